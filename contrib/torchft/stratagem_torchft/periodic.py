"""Train each replica for some steps, then average over the replicas that are alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import LOSS_SCALING, TEAMS, WITHIN_TEAM, Capabilities, hookimpl
from stratagem.api.validators import at_least, between, more_than
from stratagem.errors import ConfigError
from stratagem_process_group.messages import local_tensor
from stratagem_torchft.messages import pack, trained_parameters, unpack
from stratagem_torchft.replica import REPLICAS, TorchFTStrategy

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class PeriodicStrategy(TorchFTStrategy):
    """Averages the change of each replica's parameters since the last exchange, the *anchor*.

    Each replica sends its change multiplied by a weight, and the weight: 1 if it has trained since the last exchange. A
    replica that has just received the state of another one sends 0, and counts no one's work twice.
    """

    #: Optimizer steps between two exchanges. More steps send less, and replicas differ more.
    sync_every: int = field(default=32, validator=at_least(1))

    #: The parameters after their last exchange, as all replicas have them, at least in fp32.
    _anchor: dict[str, Tensor] = field(init=False, factory=dict)
    _momentum: dict[str, Tensor] = field(init=False, factory=dict)
    #: Steps since the last exchange.
    _local_steps: int = field(init=False, default=0)
    #: Exchanges that changed parameters.
    _rounds: int = field(init=False, default=0)
    _is_due: bool = field(init=False, default=False)

    capabilities = Capabilities(
        provides={REPLICAS, TEAMS}, requires={WITHIN_TEAM}, conflicts={REPLICAS, TEAMS, LOSS_SCALING}
    )

    # --- Overridden by each method -------------------------------------------------------------------------------

    def _num_parts(self) -> int:
        """Return in how many parts the parameters are exchanged, in turn."""
        return 1

    def _outer_step(self, name: str, change: Tensor) -> None:
        """Move the anchor of a parameter by its average `change`, which has the sign of a gradient."""
        self._anchor[name].sub_(change)

    # --- The step ------------------------------------------------------------------------------------------------

    def _begin(self, run: RunContext) -> None:
        """Begin with the parameters of one replica, or take part in the others' exchange with a weight of 0."""
        self._connect(run)
        began = self._agree_on_start(run)
        if began or self._anchor.keys() != self._parameters(run).keys():
            self._reset(run)
        if not began:
            self._sync(run, weight=0.0, starts=True)

    def _parameters(self, run: RunContext) -> dict[str, Tensor]:
        assert run.module is not None, "set before wrap_model"
        return {name: local_tensor(parameter) for name, parameter in trained_parameters(run.module).items()}

    def _averaged(self, run: RunContext) -> dict[str, Tensor]:
        """Return the parameters that have an anchor, also those that were frozen since.

        Raises:
            ConfigError: another parameter became trainable.
        """
        assert run.module is not None, "set before wrap_model"
        if thawed := [name for name in trained_parameters(run.module) if name not in self._anchor]:
            raise ConfigError(
                f"{thawed[0]!r} was frozen when training began and is trained now, and {self.path} does not average it",
                expected="the same trainable parameters during the whole fit",
                do="begin with it trainable, or train in two fits",
            )
        return {name: local_tensor(each) for name, each in run.module.named_parameters() if name in self._anchor}

    def _reset(self, run: RunContext) -> None:
        self._anchor = {name: _to_at_least_fp32(tensor) for name, tensor in self._parameters(run).items()}
        self._momentum, self._local_steps, self._rounds = {}, 0, 0

    @hookimpl(wrapper=True)
    def step_optimizers(self, run: RunContext) -> Generator[None, bool, bool]:
        if self._manager is None:  # a loop of the user's has no on_train_start
            self._begin(run)
        stepped = yield
        self._local_steps += 1
        self._is_due = self._local_steps >= self.sync_every // self._num_parts()
        if self._is_due and not run.owns_loop:
            self._sync(run, weight=1.0)
        return stepped

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_batch_end(self, run: RunContext) -> None:
        # After the loop has counted the step, so that a replica that joins gets the numbers of the next one.
        if self._is_due:
            self._sync(run, weight=1.0)

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_end(self, run: RunContext) -> None:
        """Average what is left, without momentum: all replicas end with the same weights."""
        parts = self._num_parts()
        if self._manager is not None and (self._local_steps or parts > 1):
            for _ in range(parts):
                self._sync(run, weight=1.0, ends=True)

    def _sync(self, run: RunContext, weight: float, *, starts: bool = False, ends: bool = False) -> None:
        if not self._has_quorum:
            self._start_quorum()
        while True:
            if self._received is not None:
                self._apply(starts=starts)
                weight = 0.0
            mine = self._averaged(run)
            names = self._part(list(mine))
            changes = {name: (self._anchor[name] - mine[name]) * weight for name in names}
            weighing = torch.tensor([weight], device=run.device)
            averaged = self._exchange(lambda c=changes, w=weighing: [*pack(c), w.clone()])  # type: ignore[misc]
            if averaged is not None:
                break
        self._is_due = False
        *messages, total = averaged
        total = total.squeeze()  # a parameter may have no dimension, either
        if total.item() == 0:  # all replicas begin, or resume within a period
            return
        self._local_steps = 0
        self._rounds += 1
        with torch.no_grad():
            for name, change in unpack(messages, changes).items():
                if ends:
                    self._anchor[name].sub_(change / total)
                else:
                    self._outer_step(name, change / total)
                mine[name].copy_(self._anchor[name])

    def _part(self, names: list[str]) -> list[str]:
        """Return the parameters of the next exchange: a range of `names`, of about as many as each other part has."""
        parts = self._num_parts()
        if parts > len(names):
            raise ConfigError(
                f"{self.path}.fragments is {parts} and the model has {len(names)} trained parameters",
                expected="at most as many fragments as parameters",
            )
        index = self._rounds % parts
        return names[index * len(names) // parts : (index + 1) * len(names) // parts]

    # --- State ---------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"sync_every": self.sync_every}

    def _to_send(self) -> dict[str, Any]:
        return super()._to_send() | {"exchanges": self._exchange_state()}

    def _exchange_state(self) -> dict[str, Any]:
        return {
            "anchor": {name: tensor.to("cpu", copy=True) for name, tensor in self._anchor.items()},
            "momentum": {name: tensor.to("cpu", copy=True) for name, tensor in self._momentum.items()},
            "rounds": self._rounds,
            "local_steps": self._local_steps,
        }

    def _apply(self, *, starts: bool, pending: int = 0) -> None:
        assert self._received is not None
        state = self._received["exchanges"]
        super()._apply(starts=starts, pending=pending)
        self._restore(state, self._run)

    def _restore(self, state: dict[str, Any], run: RunContext) -> None:
        devices = {name: tensor.device for name, tensor in self._parameters(run).items()}
        self._anchor = {name: tensor.to(devices[name], copy=True) for name, tensor in state["anchor"].items()}
        self._momentum = {name: tensor.to(devices[name], copy=True) for name, tensor in state["momentum"].items()}
        self._rounds, self._local_steps = state["rounds"], state["local_steps"]

    @hookimpl(wrapper=True)
    def load_model_state(self) -> Generator[None, bool, bool]:
        done = yield
        self._anchor = {}
        return done

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        """Return this rank's part of the anchor and of the outer momentum."""
        return self._exchange_state()

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        """Restore them; with another number of processes the loaded parameters are the anchor."""
        mine = states[run.rank] if len(states) == run.world_size else None
        own = self._parameters(run)
        fits = mine is not None and {n: t.shape for n, t in mine["anchor"].items()} == {
            name: tensor.shape for name, tensor in own.items()
        }
        if not run.collectives.any(not fits) and mine is not None:
            self._restore(mine, run)

    @hookimpl
    def teardown(self) -> None:
        super().teardown()
        self._anchor, self._momentum, self._local_steps, self._is_due = {}, {}, 0, False


@define(eq=False, kw_only=True)
class TorchFTLocalSGDStrategy(PeriodicStrategy):
    """Every replica trains for some steps; then the parameters are averaged over the replicas that are alive.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    path: ClassVar[str] = "strategy.torchft_local_sgd"


@define(eq=False, kw_only=True)
class TorchFTDiLoCoStrategy(PeriodicStrategy):
    """Every replica trains for some steps; then an outer SGD steps with the average change of the parameters.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; with fragments
    "Streaming DiLoCo with overlapping communication", 2025.
    """

    path: ClassVar[str] = "strategy.torchft_diloco"

    #: Learning rate of the outer SGD: 1 without momentum gives the average of the replicas' parameters.
    outer_lr: float = field(default=0.7, validator=more_than(0))
    #: Momentum of the outer SGD; 0 saves the memory for it.
    outer_momentum: float = field(default=0.9, validator=between(0, 1))
    #: Nesterov momentum instead of classical momentum.
    nesterov: bool = True
    #: Parts of the parameters that are exchanged in turn, each once in `sync_every` steps: more parts send less at a
    #: time, and more often.
    fragments: int = field(default=1, validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.sync_every % self.fragments:
            raise ConfigError(
                f"{self.path}.sync_every is {self.sync_every} with fragments={self.fragments}",
                expected="a multiple of fragments, each of which is exchanged once in that many steps",
            )

    def _num_parts(self) -> int:
        return self.fragments

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {
            name: getattr(self, name) for name in ("outer_lr", "outer_momentum", "nesterov", "fragments")
        }

    def _outer_step(self, name: str, change: Tensor) -> None:
        direction = change
        if self.outer_momentum:
            previous = self._momentum.get(name)
            momentum = change.clone() if previous is None else previous.mul_(self.outer_momentum).add_(change)
            self._momentum[name] = momentum
            direction = change.add(momentum, alpha=self.outer_momentum) if self.nesterov else momentum
        self._anchor[name].sub_(direction, alpha=self.outer_lr)


def _to_at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
