"""Train one model with peers that come and go, over the internet: each averages gradients through hivemind."""

from __future__ import annotations

import atexit
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import (
    CUSTOM_CLIPPING,
    FULL_STATE,
    LOSS_SCALING,
    SHARDED_PARAMETERS,
    STEPPED_COPIES,
    TEAMS,
    Capabilities,
    Strategy,
    hookimpl,
)  # fmt: skip
from stratagem.api.batches import map_batch
from stratagem.api.capabilities import STEPS_IN_BACKWARD
from stratagem.api.options import options
from stratagem.api.parameters import needs_closure
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError
from stratagem_hivemind.checks import addresses_of_peers, as_list, check_averager_options, check_name, unsupported
from stratagem_hivemind.gradients import check_trained, flat_buffer, flat_gradients, set_gradients
from stratagem_hivemind.sent_state import read, written

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from torch.optim import Optimizer

    from stratagem.api import Collectives, RunContext, World
    from stratagem_hivemind.swarm import Record, Swarm
    from stratagem_trainer.api import TrainerView

_DELAYED = unsupported(
    "the strategy averages in the foreground, so that all peers make the same step",
    "drop it; strategy.async_averaging averages while training continues, within one run",
)


@define(eq=False, kw_only=True)
class HivemindStrategy(Strategy):
    """Each peer is a run of its own: one process, or the processes of the strategy inside."""

    outer: ClassVar[bool] = True

    #: Samples of all peers for one optimizer step. By default the peers step after each batch. A larger number sends
    #: gradients less often.
    target_batch_size: int | None = field(default=None, validator=at_least(1))
    #: Addresses of peers that run already, as a list or as text with commas; by default what the variable INITIAL_PEERS
    #: or PL_INITIAL_PEERS has. Without any, this peer is the first one.
    initial_peers: list[str] | str | None = field(default=None, converter=as_list)
    #: Peers with the same name train the same model.
    run_id: str = field(default="stratagem", validator=check_name)
    #: Samples in a batch of one process, where the loader does not tell.
    batch_size: int | None = field(default=None, validator=at_least(1))
    #: How many peers have to be there before the first step. The first peer of several that start together would train
    #: some steps alone otherwise.
    min_peers: int = field(default=1, validator=at_least(1))
    #: How long to wait for `min_peers`, in seconds.
    wait_timeout: float = field(default=300.0, validator=more_than(0))
    #: How long a round waits for peers that are late, in seconds. Those that come later lose the gradients of a step.
    matchmaking_time: float = field(default=5.0, validator=more_than(0))
    #: After how many seconds without an answer of others this peer makes a step alone.
    averaging_timeout: float = field(default=30.0, validator=more_than(0))
    #: Print a line for each round.
    verbose: bool = False
    #: More arguments of hivemind.DecentralizedAverager, such as ``part_size_bytes``.
    averager_opts: dict[str, Any] | None = field(default=None, validator=check_averager_options)
    #: Addresses on which to listen; by default any free port, on all addresses of the machine.
    host_maddrs: list[str] | str = field(factory=lambda: ["/ip4/0.0.0.0/tcp/0"], converter=as_list)
    #: Addresses that others see, for instance those of a router that forwards a port.
    announce_maddrs: list[str] | str | None = field(default=None, converter=as_list)
    #: A file with the key of this peer: with one, its address stays the same when it starts again.
    identity_path: str | None = None
    #: Find peers through the public network IPFS instead of `initial_peers`.
    use_ipfs: bool = False
    #: Only connect to others, never the other way: for a peer behind a firewall. It cannot be the first.
    client_mode: bool = False
    #: Relative speed of the network of this peer: with 0, others average its part.
    bandwidth: float | None = field(default=None, validator=at_least(0))

    #: Not supported.
    delay_state_averaging: Any = field(default=None, validator=_DELAYED)
    #: Not supported.
    delay_optimizer_step: Any = field(default=None, validator=_DELAYED)
    #: Not supported.
    delay_grad_averaging: Any = field(default=None, validator=_DELAYED)
    #: Not supported.
    offload_optimizer: Any = field(
        default=None,
        validator=unsupported("the optimizer steps where the parameters are", "drop it"),
    )
    #: Not supported.
    reuse_grad_buffers: Any = field(
        default=None,
        validator=unsupported("gradients of a step that is not complete are kept apart", "drop it"),
    )
    #: Not supported.
    scheduler_fn: Any = field(
        default=None,
        validator=unsupported(
            "schedulers step with the optimizer steps that all peers make",
            "return the scheduler in configure_optimizers",
        ),
    )

    capabilities = Capabilities(
        requires={CUSTOM_CLIPPING, FULL_STATE},
        conflicts={LOSS_SCALING, SHARDED_PARAMETERS, STEPPED_COPIES, TEAMS, STEPS_IN_BACKWARD},
    )

    _dht: Any = field(init=False, default=None)
    _stop_dht: Callable[[], None] | None = field(init=False, default=None)
    _swarm: Swarm | None = field(init=False, default=None)
    _joined: bool = field(init=False, default=False)
    _rank: int = field(init=False, default=0)
    _parameters: list[torch.nn.Parameter] = field(init=False, factory=list)
    #: Samples of a batch: the last one, and those since the last backward that may end in a step.
    _in_batch: int = field(init=False, default=0)
    _since_sync: int = field(init=False, default=0)
    #: Backward passes, and samples, in the window; how many make a step.
    _passes: int = field(init=False, default=0)
    _samples: int = field(init=False, default=0)
    _window: int = field(init=False, default=1)
    #: Samples of this peer's processes in a backward pass that may end in a step, as expected.
    _nominal: int = field(init=False, default=1)
    #: Sum of gradients times samples in the window, and the flags of parameters that have one.
    _sum: Tensor | None = field(init=False, default=None)
    #: The peers of the step that the optimizer makes now; None if the window is open.
    _stepping: tuple[Record, ...] | None = field(init=False, default=None)
    _restored: dict[str, Any] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.use_ipfs and self.initial_peers:
            raise ConfigError(
                "strategy.hivemind.use_ipfs is True and initial_peers is set", expected="one of the two", do="drop one"
            )

    # --- The network ---------------------------------------------------------------------------------------------

    @property
    def dht(self) -> Any:
        """hivemind's DHT of this peer: ``strategy.dht.get_visible_maddrs()``. It starts on first use.

        Raises:
            ConfigError: this process is not rank 0 of its peer, which alone has a DHT.
        """
        if self._rank > 0:
            raise ConfigError(
                f"dht of strategy 'hivemind' was read on rank {self._rank} of a peer",
                expected="rank 0, which alone talks to the other peers",
                do="read it if trainer.is_global_zero",
            )
        if self._dht is None:
            self._dht = self._start_dht()
        return self._dht

    @property
    def num_peers(self) -> int:
        """How many peers train together now, this one among them; it asks the DHT.

        Raises:
            ConfigError: this process has not joined the others, or is not rank 0 of its peer.
        """
        if self._swarm is None or not self._joined:
            raise ConfigError(
                f"num_peers of strategy 'hivemind' was read {f'on rank {self._rank}' if self._rank else 'outside fit'}",
                expected="rank 0 of a peer that trains",
                do="read it in a hook such as on_train_batch_end, if trainer.is_global_zero",
            )
        return len(self._swarm.records())

    def _start_dht(self) -> Any:
        from stratagem_hivemind.node import start_node

        dht, self._stop_dht = start_node(
            self.run_id, self.initial_peers, use_ipfs=self.use_ipfs, client_mode=self.client_mode,  # type: ignore[arg-type]
            host_maddrs=self.host_maddrs, announce_maddrs=self.announce_maddrs, identity_path=self.identity_path,
        )  # fmt: skip
        atexit.register(self._stop_dht)
        return dht

    @hookimpl(wrapper=True)
    def connect(self, world: World, run: RunContext) -> Generator[None, Collectives, Collectives]:
        error: Exception | None = None
        self._rank = world.rank
        if world.rank == 0:
            try:
                _ = self.dht  # before there are threads: its process is a fork
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
        collectives = yield
        collectives.fail_together(error)
        return collectives

    @hookimpl(wrapper=True)
    def wrap_optimizers(self, run: RunContext) -> Generator[None, list[Optimizer], list[Optimizer]]:
        optimizers = yield
        self._check(optimizers, run)
        assert run.module is not None
        parameters = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
        if self._swarm is not None and list(map(id, parameters)) != list(map(id, self._parameters)):
            self._leave()
            if self._swarm is not None:
                self._swarm.close()
            self._swarm = None
        self._parameters = parameters
        if run.rank == 0 and self._swarm is None:
            self._swarm = self._start_swarm(run)
        return optimizers

    def _check(self, optimizers: list[Optimizer], run: RunContext) -> None:
        if run.manual:
            raise ConfigError(
                f"strategy is 'hivemind' and {type(run.module).__name__} uses manual optimization",
                expected="automatic optimization, in which the end of each step is known",
                do="set automatic_optimization = True",
            )
        names = [type(each).__name__ for each in optimizers]
        if len(optimizers) != 1 or needs_closure(optimizers[0]):
            raise ConfigError(
                f"strategy is 'hivemind' with {', '.join(names) or 'no optimizer'}",
                expected="one optimizer that steps without a closure, such as AdamW",
            )

    def _start_swarm(self, run: RunContext) -> Swarm:
        from stratagem_hivemind.swarm import Swarm

        is_first = not addresses_of_peers(self.initial_peers)  # type: ignore[arg-type]
        swarm = Swarm(self.dht, self.run_id, self.matchmaking_time, self.averaging_timeout, self.verbose, is_first)
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in self._parameters) else torch.float32
        size = sum(each.numel() for each in self._parameters) + len(self._parameters)
        more = {"bandwidth": self.bandwidth, "client_mode": self.client_mode} | (self.averager_opts or {})
        swarm.start_averager(size, dtype, functools.partial(self._state_to_share, run), **more)
        return swarm

    # --- Joining and leaving -------------------------------------------------------------------------------------

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_start(self, trainer: TrainerView, run: RunContext) -> None:
        self._join(run, trainer.batch_size, trainer.accumulate_grad_batches)

    @hookimpl(optionalhook=True, trylast=True)
    def on_train_end(self) -> None:
        self._leave()

    @hookimpl(optionalhook=True)
    def on_exception(self) -> None:
        self._leave()

    @hookimpl
    def teardown(self) -> None:
        self._leave()
        if self._swarm is not None:
            self._swarm.close()
        if self._stop_dht is not None:
            self._stop_dht()
            atexit.unregister(self._stop_dht)
        self._dht, self._stop_dht, self._rank = None, None, 0
        self._swarm, self._parameters, self._sum = None, [], None

    def _join(self, run: RunContext, batch_size: int | None, accumulated: int = 1) -> None:
        """Wait for peers; get the state of those that train already. Collective over this peer's processes."""
        batch_size = self.batch_size or batch_size or (1 if self.target_batch_size is None else None)
        if batch_size is None:
            raise ConfigError(
                f"strategy.hivemind.target_batch_size is {self.target_batch_size}, and the loader has no batch size",
                expected="strategy.hivemind.batch_size",
                do="set it to the number of samples in a batch of one process",
            )
        self._joined, self._stepping, self._window = True, None, 1
        self._nominal = batch_size * run.mesh.num_data_shards * accumulated
        error, state, swarm = None, None, self._swarm
        if swarm is not None:
            try:
                swarm.steps = self._restored.get("steps", 0)
                state = swarm.join(self._nominal, self.min_peers, self.wait_timeout)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
        run.collectives.fail_together(error)
        if run.collectives.any(state is not None):
            self._adopt(state, run)
            return
        self._reset_window()
        if swarm is not None:
            self._window = self._window_for(swarm.records())
            self._passes, self._samples = self._restored.get("passes", 0), self._restored.get("samples", 0)
            if self._passes:
                self._sum = self._restored["sum"].to(run.device)
            swarm.share()
            swarm.welcome()
        self._passes, self._samples, self._window = run.collectives.broadcast_object(
            (self._passes, self._samples, self._window)
        )

    def _leave(self) -> None:
        self._joined = False
        if self._swarm is not None:
            self._swarm.leave()

    def _window_for(self, peers: Iterable[Record]) -> int:
        """Return after how many backward passes of each of `peers` they have `target_batch_size` samples together."""
        together: int = sum(peer.samples for peer in peers)
        return math.ceil((self.target_batch_size or 1) / together)

    # --- State for other peers -----------------------------------------------------------------------------------

    def _state_to_share(self, run: RunContext) -> tuple[dict[str, Any], list[Tensor]]:
        """Return this peer's state as bytes. Called in a thread; waits until a step and its schedulers are done."""
        swarm = self._swarm
        assert swarm is not None
        with swarm.lock:
            metadata = {"history": swarm.history, "steps": swarm.steps, "window": self._window}
            return metadata, [written(run)]

    def _adopt(self, state: Any, run: RunContext) -> None:
        """Load what a peer sent to rank 0. Collective."""
        metadata, tensors = state or ({}, [])
        if state is not None:
            tensors = read(tensors[0])
        metadata, loaded = run.collectives.broadcast_object((metadata, tensors))
        assert run.module is not None
        try:
            run.module.load_state_dict(loaded["model"])
            run.optimizers[0].load_state_dict(loaded["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the peers of strategy.hivemind.run_id={self.run_id!r} train another model or optimizer "
                f"({str(error).splitlines()[-1].strip()})",
                expected="the same program on all peers",
                do="set another run_id",
            ) from error
        for config, entry in zip(run.lr_scheduler_configs, loaded["schedulers"], strict=False):
            config.scheduler.load_state_dict(entry)
        self._window = metadata["window"]
        self._reset_window()
        if self._swarm is not None:
            self._swarm.adopt(metadata["history"], metadata["steps"])

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def transfer_batch(self, run: RunContext) -> Generator[None, Any, Any]:
        batch = yield
        if run.stage == "train":
            sizes: list[int] = []
            map_batch(batch, lambda leaf: sizes.append(len(leaf)) if isinstance(leaf, Tensor) and leaf.dim() else None)
            self._in_batch = sizes[0] if sizes else 0
        return batch

    @hookimpl(wrapper=True)
    def backward(self, run: RunContext) -> Generator[None, bool, bool]:
        answer = yield
        if run.stage != "train":
            return answer
        if not self._joined:
            self._join(run, None)  # a loop of the user's own
        if self._swarm is not None:
            self._swarm.end_step()  # there, too
        self._since_sync += self._in_batch * run.mesh.num_data_shards or self._nominal
        if run.sync_gradients:
            samples, self._since_sync = self._since_sync, 0
            self._count(samples, run)
        return answer

    def _count(self, samples: int, run: RunContext) -> None:
        """Add the gradients of `samples` to the window; average them with the other peers if that ends it."""
        check_trained(run.module, self._parameters)
        self._passes += 1
        self._samples += samples
        with torch.no_grad():
            if run.rank == 0:
                gradients = flat_gradients(self._parameters)
                gradients *= samples
                self._sum = gradients if self._sum is None else self._sum.add_(gradients)
            self._stepping = None
            for parameter in self._parameters:
                parameter.grad = None  # the optimizer skips a parameter without gradient
            if self._passes >= self._window:
                self._average(run)

    def _average(self, run: RunContext) -> None:
        swarm, outcome = self._swarm, None
        message = flat_buffer(self._parameters, run.device)
        if swarm is not None:
            assert self._sum is not None
            outcome = swarm.average((self._sum / self._samples).cpu(), self._samples)
            if outcome.average is not None:
                message.copy_(outcome.average)
        peers = run.collectives.broadcast_object(None if outcome is None else outcome.peers)
        self._reset_window()
        if not peers:
            self._catch_up(run)
            return
        self._window = self._window_for(peers)
        if run.world_size > 1:
            run.collectives.broadcast(message)
        set_gradients(self._parameters, message)
        self._stepping = peers

    def _catch_up(self, run: RunContext) -> None:
        """Load the state of the peers that went on without this one."""
        state = None if self._swarm is None else self._swarm.catch_up()
        if run.collectives.any(state is not None):
            self._adopt(state, run)

    def _reset_window(self) -> None:
        self._passes = self._samples = self._since_sync = 0
        self._sum = None

    @hookimpl(wrapper=True)
    def step_optimizers(self, run: RunContext) -> Generator[None, bool, bool]:
        swarm, peers = self._swarm, self._stepping
        if peers is None:
            yield
            return False
        if swarm is None:
            return (yield)
        swarm.begin_step()
        stepped = yield
        swarm.advance(peers)
        return stepped

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_batch_end(self) -> None:
        if self._swarm is not None:
            self._swarm.end_step()

    # --- State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        steps = 0 if self._swarm is None else self._swarm.steps
        state: dict[str, Any] = {"steps": steps, "passes": self._passes, "samples": self._samples}
        return state if self._sum is None else state | {"sum": self._sum.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs made it
