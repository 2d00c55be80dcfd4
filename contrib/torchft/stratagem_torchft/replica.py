"""A replica of the model among others: its manager, quorums, commits, and how it comes back.

[Note: quorums and commits]
A *replica* is a run of its own: one process, or several with a strategy such as ddp inside. The lighthouse knows which
replicas are alive. An *exchange* averages messages over the replicas. It needs a *quorum*, the replicas that take part;
each quorum connects them again if they changed. An exchange is *committed* if it succeeded on all ranks of one; if
one failed, because another replica died within it, there is a new quorum, and the same messages are averaged again over
those that are left. So the others lose no step.

A replica whose manager counts fewer commits than another's is behind: its quorum brings the state of one that is not.
It happens before the first step of a replica that was started again; later only if a commit succeeded elsewhere and
failed here, or if the others went on without a replica that was too slow.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field, fields

from stratagem.api import (
    CLOSURE_OPTIMIZERS,
    LOSS_SCALING,
    MANUAL_OPTIMIZATION,
    MULTIPLE_OPTIMIZERS,
    TEAMS,
    WITHIN_TEAM,
    Capabilities,
    Mesh,
    Strategy,
    hookimpl,
)
from stratagem.api.capabilities import STEPS_IN_BACKWARD
from stratagem.api.parameters import needs_closure
from stratagem.api.seeding import sampler_seed
from stratagem.api.validators import at_least, duration
from stratagem.errors import ConfigError, LaunchError
from stratagem_process_group.messages import local_tensor
from stratagem_torchft import lighthouse, replica_state
from stratagem_torchft.messages import pack, unpack
from stratagem_torchft.values import is_installed, minute, nothing, read_number

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: The capability of each strategy of this package; two of them cannot be combined.
REPLICAS = "torchft:replicas"
#: The variables of torchft's examples for the number of this replica, and of all.
_REPLICA_VARIABLE, _COUNT_VARIABLE = "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"
_FACTS_BYTES = 1024  # in which the facts that replicas compare are sent
_PAUSE_S = 0.2  # before an exchange is tried again


@define(eq=False, kw_only=True)
class TorchFTStrategy(Strategy):
    """Replicas that are runs of their own, joined through a lighthouse; see [Note: quorums and commits]."""

    outer: ClassVar[bool] = True
    #: The path of the options in error messages.
    path: ClassVar[str] = ""

    #: Address of the lighthouse, "host:port"; by default that of the variable TORCHFT_LIGHTHOUSE.
    lighthouse: str | None = None
    #: Number of this replica, from 0, by default REPLICA_GROUP_ID: it reads this part of the training data. A replica
    #: that is started again has its earlier number.
    replica_id: int | None = field(default=None, validator=at_least(0))
    #: Into how many parts the training data is divided, by default NUM_REPLICA_GROUPS: the largest number of replicas.
    #: The part of one that is down is not read.
    num_replicas: int | None = field(default=None, validator=at_least(1))
    #: Replicas that a commit needs. With fewer, training waits for `quorum_timeout`; a larger number keeps the batch
    #: that is averaged large, a smaller one goes on with fewer.
    min_replica_size: int = field(default=1, validator=at_least(1))
    #: "dynamic" averages over all replicas; "fixed_with_spares" over `min_replica_size` of them: others compute, and
    #: contribute only when one is lost.
    world_size_mode: Literal["dynamic", "fixed_with_spares"] = "dynamic"
    #: How long an exchange or the state of another replica may take, in seconds or as a timedelta. A shorter time finds
    #: a replica that hangs sooner, and must be longer than replicas differ in a step.
    timeout: timedelta = field(factory=minute, validator=duration)
    #: How long to wait for enough replicas. Longer than the time between two exchanges of another replica, also of one
    #: that validates or saves.
    quorum_timeout: timedelta = field(factory=minute, validator=duration)
    #: How long to try to reach the lighthouse or another replica.
    connect_timeout: timedelta = field(factory=lambda: timedelta(seconds=10), validator=duration)
    #: How often a quorum is tried again before training ends with an error: more survive a lighthouse that restarts.
    quorum_retries: int = field(default=0, validator=at_least(0))
    #: Commits that may fail one after another before training ends with an error; None tries until `quorum_timeout`.
    max_retries: int | None = field(default=None, validator=at_least(0))
    #: Name under which other replicas reach this machine; by default its host name.
    hostname: str | None = None

    _manager: Any = field(init=False, default=None)
    #: The store of this replica, on its rank 0.
    _store: Any = field(init=False, default=None)
    _run: Any = field(init=False, default=None)
    _module_ref: Callable[[], Any] = field(init=False, default=nothing)
    _trainer: Any = field(init=False, default=None)
    #: There is a quorum whose exchange is not committed yet.
    _has_quorum: bool = field(init=False, default=False)
    #: The state of another replica, which the last quorum brought, until it is applied.
    _received: dict[str, Any] | None = field(init=False, default=None)
    #: Commits so far, from a checkpoint, for a manager that is not made yet.
    _commits: dict[str, int] | None = field(init=False, default=None)

    capabilities = Capabilities(
        provides={REPLICAS},
        requires={WITHIN_TEAM},
        conflicts={REPLICAS, TEAMS, LOSS_SCALING, STEPS_IN_BACKWARD},  # gradients are averaged after backward
    )

    def __attrs_post_init__(self) -> None:
        for name in ("timeout", "quorum_timeout", "connect_timeout"):
            given: Any = getattr(self, name)
            if isinstance(given, int | float):
                setattr(self, name, timedelta(seconds=given))
        if self.replica_id is not None and self.num_replicas is not None:
            self._check_place(self.replica_id, self.num_replicas)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(type(self)) if each.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs made it

    # --- Data ----------------------------------------------------------------------------------------------------

    def place(self) -> tuple[int, int]:
        """Return the number of this replica, and into how many parts the data is divided.

        Raises:
            ConfigError: only one of the two is known, or they contradict each other.
        """
        number = read_number(self.replica_id, _REPLICA_VARIABLE)
        count = read_number(self.num_replicas, _COUNT_VARIABLE)
        if number is None or count is None:
            missing, variable = (
                ("replica_id", _REPLICA_VARIABLE) if number is None else ("num_replicas", _COUNT_VARIABLE)
            )
            raise ConfigError(
                f"{self.path}.{missing} is not set and neither is {variable}",
                expected="the number of this replica, and how many there are at most: each reads a part of the data",
                do=f'pass strategy=[{{"name": "{self.path.split(".")[-1]}", "replica_id": 0, "num_replicas": 2}}, ...]',
            )
        self._check_place(number, count)
        return number, count

    def _check_place(self, number: int, count: int) -> None:
        if number >= count:
            raise ConfigError(
                f"{self.path}.replica_id is {number} with num_replicas={count}",
                expected=f"a number from 0 to {count - 1}",
            )

    def data_mesh(self, mesh: Mesh, stage: str) -> Mesh:
        """Give each replica a part of the training data; every replica validates, tests and predicts with all."""
        if stage != "train":
            return mesh
        number, count = self.place()
        shards = mesh.num_data_shards
        return Mesh(axes={"data": count * shards}, rank=number * shards + mesh.data_shard)

    # --- The start and the end -----------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def wrap_model(self, run: RunContext) -> Generator[None, nn.Module, nn.Module]:
        if run.stage == "train":
            error = None
            try:
                self._check_options(run)
            except ConfigError as caught:
                error = caught
            run.collectives.fail_together(error)
            if self._module_ref() is not run.module:  # other replicas begin with it, too
                self._disconnect()
                self._commits = None
            self._run, self._module_ref = run, weakref.ref(run.module) if run.module is not None else nothing
        return (yield)

    def _check_options(self, run: RunContext) -> None:
        if not is_installed():
            raise ConfigError(
                f"{self.path} was chosen, and torchft is not installed",
                expected="torchft 0.2",
                do="pip install torchft, or use ddp, which trains without replicas that may fail",
            )
        if run.environment.simulated:
            raise ConfigError(f"{self.path} averages with other runs, and a plan is of one", do='plan strategy="ddp"')
        self.place()
        found = lighthouse.find(self.lighthouse, self.path)
        if self._manager is None and run.rank == 0:
            found.check(self.connect_timeout)

    @hookimpl(wrapper=True)
    def wrap_optimizers(self, run: RunContext) -> Generator[None, list[Optimizer], list[Optimizer]]:
        optimizers = yield
        for optimizer in optimizers:
            if needs_closure(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} needs {CLOSURE_OPTIMIZERS!r}, which {self.path} lacks",
                    expected="an optimizer that evaluates the model once a step, such as AdamW",
                    do="use such an optimizer, or ddp",
                )
        if run.manual or len(optimizers) > 1:
            raise ConfigError(
                f"{type(run.module).__name__} needs {MANUAL_OPTIMIZATION!r} or {MULTIPLE_OPTIMIZERS!r}, which "
                f"{self.path} lacks",
                expected="automatic optimization with one optimizer, in which each step has one commit",
                do="set automatic_optimization = True, or use ddp",
            )
        return optimizers

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_start(self, trainer: TrainerView, run: RunContext) -> None:
        self._trainer = trainer
        self._begin(run)

    def _begin(self, run: RunContext) -> None:
        """Join the other replicas, and take over their state if they have trained already."""
        raise NotImplementedError

    def _agree_on_start(self, run: RunContext) -> bool:
        """Give all replicas the parameters and buffers of one of them, if none has trained yet; return whether it did.

        torchft's own synchronization takes those of another replica on each rank of a replica: ranks that replicate
        the model would differ.

        Raises:
            ConfigError: the replicas do not train in the same way.
        """
        if not self._has_quorum:
            self._start_quorum()
        if self._received is not None or self._manager.current_step() > 0:
            return False
        assert run.module is not None, "set before wrap_model"
        tensors = {
            name: local_tensor(tensor)
            for name, tensor in (*run.module.named_parameters(), *run.module.named_buffers())
            if not tensor.is_meta
        }
        facts = torch.zeros(_FACTS_BYTES, dtype=torch.uint8, device=run.device)
        text = json.dumps(self._facts()).encode()
        facts[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)

        def make() -> list[Tensor]:
            is_source = self._manager.participating_rank() == 0
            numbers = {name: t.to(torch.uint8) if t.dtype == torch.bool else t for name, t in tensors.items()}
            return [message * is_source for message in (facts, *pack(numbers))]

        summed = self._exchange(make, torch.distributed.ReduceOp.SUM)
        if summed is None:
            return False
        self._check_facts(json.loads(bytes(summed[0].tolist()).rstrip(b"\0")))
        shapes = {name: t.to(torch.uint8) if t.dtype == torch.bool else t for name, t in tensors.items()}
        with torch.no_grad():
            for name, values in unpack(summed[1:], shapes).items():
                tensors[name].copy_(values)
        return True

    def _check_facts(self, theirs: dict[str, Any]) -> None:
        for name, mine in self._facts().items():
            if theirs.get(name) != mine:
                raise ConfigError(
                    f"{name} is {mine!r} in replica {self.place()[0]} and {theirs.get(name)!r} in another one",
                    expected="the same in all replicas",
                )

    def _connect(self, run: RunContext) -> None:
        """Make the manager. The others wait for it in their next quorum, so this is done right before the first."""
        if self._manager is not None:
            return
        os.environ.setdefault("RUST_LOG", "warn")  # its servers write ten lines for each step otherwise
        if run.rank == 0:
            self._store = torch.distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104
        number, _ = self.place()
        self._manager = lighthouse.make_manager(
            lighthouse.ManagerOptions(
                lighthouse=lighthouse.find(self.lighthouse, self.path),
                replica_id=number,
                min_replica_size=self.min_replica_size,
                timeout=self.timeout,
                quorum_timeout=self.quorum_timeout,
                connect_timeout=self.connect_timeout,
                quorum_retries=self.quorum_retries,
                max_retries=self.max_retries,
                spares=self.world_size_mode == "fixed_with_spares",
                hostname=self.hostname or socket.gethostname(),
            ),
            run,
            self._store,
        )
        if self._commits is not None:
            self._manager.load_state_dict(self._commits)
        self._manager.register_state_dict_fn("stratagem", self._receive, self._to_send)

    @hookimpl(optionalhook=True)
    def on_fit_end(self, run: RunContext) -> None:
        # Rank 0 has the manager's server, which answers the last commit of each rank before it ends.
        if self._manager is not None:
            run.collectives.barrier()

    def _disconnect(self) -> None:
        if self._manager is not None:
            self._commits = self._manager.state_dict()
            self._manager.shutdown(wait=True)
            self._manager._pg.shutdown()
        self._manager = self._store = self._received = None
        self._has_quorum = False

    @hookimpl
    def teardown(self) -> None:
        self._disconnect()
        self._run, self._trainer, self._module_ref = None, None, nothing

    # --- Exchanges -----------------------------------------------------------------------------------------------

    def _start_quorum(self) -> None:
        """Wait for a quorum; it may leave the state of another replica in ``self._received``.

        Raises:
            LaunchError: the lighthouse is gone, or there were too few replicas.
        """
        try:
            self._manager.start_quorum()
        except Exception as error:
            raise self._failure("no quorum of replicas was reached", error) from error
        self._has_quorum = True

    def _exchange(self, make: Callable[[], list[Tensor]], op: Any = None) -> list[Tensor] | None:
        """Return the averages (or another `op`) of the messages that `make` returns, once they are committed.

        `make` is called again after a failure. None: the state of another replica was received instead, and there is a
        quorum for its next exchange.

        Raises:
            LaunchError: no commit within `quorum_timeout`.
        """
        failed_at: float | None = None
        while True:
            messages = make()
            options = {} if op is None else {"reduce_op": op}
            for work in [self._manager.allreduce(message, **options) for message in messages]:
                work.wait()
            if self._should_commit():
                self._has_quorum = False
                return messages
            failed_at = failed_at or time.monotonic()
            self._check_patience(failed_at)
            self._start_quorum()
            if self._received is not None:
                return None

    def _should_commit(self) -> bool:
        try:
            return bool(self._manager.should_commit())
        except Exception as error:
            raise self._failure("the replica could not commit a step", error) from error

    def _check_patience(self, failed_at: float) -> None:
        here, limit_s = self._manager.num_participants(), self.quorum_timeout.total_seconds()
        if time.monotonic() - failed_at > limit_s:
            were = f"{here} replica{'s were' if here != 1 else ' was'} there for {limit_s:g} s"
            if here >= self.min_replica_size:
                error, step = self._manager.errored(), self._manager.current_step()
                reason = str(error or "another process failed").strip().splitlines()[0]
                raise LaunchError(
                    f"{were}, and every exchange of {self.path} failed after step {step} ({reason})",
                    do="look for the cause in the output of all replicas, or raise quorum_timeout",
                )
            raise LaunchError(
                f"{self.path}.min_replica_size is {self.min_replica_size} and {were}",
                do="start the others again, raise quorum_timeout, or go on with fewer: lower min_replica_size",
            )
        time.sleep(_PAUSE_S)

    def _failure(self, what: str, error: Exception) -> LaunchError:
        found = lighthouse.find(self.lighthouse, self.path)
        limit_s = self.quorum_timeout.total_seconds()
        text = re.sub(r'.*message: "([^"]*)".*', r"\1", str(error).strip(), flags=re.DOTALL)
        reason = text.splitlines()[0] if text else type(error).__name__
        return LaunchError(
            f"{found.found}, and {what} after step {self._manager.current_step()} ({reason})",
            expected=f"a lighthouse that answers, and its --min_replicas within {limit_s:g} s",
            do="start the lighthouse or the other replicas again, or raise quorum_timeout",
        )

    # --- The state of a replica that comes back ------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """Return what must be equal in all replicas."""
        facts: dict[str, Any] = {
            "strategy": self.path,
            "num_replicas": self.place()[1],
            "the number of processes of a replica": self._run.world_size,
            "the seed of samplers": sampler_seed(),
        }
        if self._trainer is not None:
            facts["accumulate_grad_batches"] = self._trainer.accumulate_grad_batches
        return facts

    def _to_send(self) -> dict[str, Any]:
        """Return the state for a replica that is behind; called in a thread of the manager within `start_quorum`."""
        trainer = self._trainer
        return replica_state.captured(self._run) | {
            "facts": self._facts(),
            "progress": None if trainer is None else self._progress(),
            "callbacks": [] if trainer is None else replica_state.callbacks_of(trainer),
        }

    def _progress(self) -> dict[str, Any]:
        """Return the position from which another replica continues."""
        return replica_state.progress_of(self._trainer)

    def _receive(self, state: dict[str, Any]) -> None:
        self._received = state

    def _apply(self, *, starts: bool, pending: int = 0) -> None:
        """Apply the received state. Before the first epoch (`starts`) the loader's position comes with it.

        Args:
            pending: steps that the loop is about to count.
        """
        state, self._received = self._received, None
        assert state is not None
        self._check_facts(state["facts"])
        replica_state.applied(state, self._run)
        if self._trainer is None or state["progress"] is None:
            return
        replica_state.apply_callbacks(self._trainer, state["callbacks"])
        if starts:
            replica_state.apply_progress(self._trainer, state["progress"])
            return
        before = self._trainer.global_step + pending
        replica_state.count_as(self._trainer, state["progress"], pending)
        if state["progress"]["global_step"] - before > 1 and self._run.is_global_zero:
            warnings.warn(
                f"replica {self.place()[0]} was {state['progress']['global_step'] - before} steps behind the others, "
                "which went on without it; it has their state now, and goes on with its own batches, so its epochs end "
                "later than theirs: end training with max_steps, or start this replica again",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        commits = self._manager.state_dict() if self._manager is not None else self._commits
        return dict(commits or {"step": 0, "batches_committed": 0})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._commits = dict(state)
        if self._manager is not None:
            self._manager.load_state_dict(self._commits)
