"""Replicas that diverge between two syncs: what is evaluated, saved and resumed.

[Note: diverging replicas]
A *team* is the set of ranks that train one replica of the model, replicated or sharded by the strategy inside. A *sync
group* has one rank of each team: those with the same part of the model. After an optimizer step the replicas of the
teams differ; a *sync*, every few steps, exchanges parameters within each sync group.

Wherever one model is needed between two syncs, it is the average over the teams: of parameters, and of floating-point
buffers such as running statistics. (Buffers that are equal in all teams stay unchanged to the bit.) Validation, test
and predict use it, a checkpoint holds it, and every process has it at the end of a fit. Optimizer state is saved as an
average, too. So any strategy can resume from a checkpoint, with any number of processes.

A checkpoint also holds each rank's own values, so that the same number of processes resume exactly.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import Collectives, Plugin, hookimpl
from stratagem.api.options import options
from stratagem.errors import ConfigError
from stratagem_outer.nested import copied_if_shared, on_cpu, on_device, without_shards
from stratagem_outer.optimizers import averaged_moments, check_optimizers, local_state, restore_local_state
from stratagem_process_group.messages import (
    average_in_place,
    broadcast_from_first,
    is_averaged,
    local_tensor,
    mean_where_different,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch.optim import Optimizer

    from stratagem.api import RunContext


def _nothing() -> None:
    return None


@define(eq=False, kw_only=True)
class DivergingReplicas(Plugin):
    """A plugin under which the replicas of the model differ between two syncs; see [Note: diverging replicas]."""

    #: The path of the plugin's options in error messages.
    path: ClassVar[str] = ""

    #: Checkpoints also hold each rank's own model and optimizer state, so that a resumed run equals an uninterrupted
    #: one; they are larger by as many copies as there are teams. Without it, all ranks resume from the average.
    exact_resume: bool = True

    #: The ranks with the same part of the model, one of each team.
    sync_group: Collectives = field(init=False, factory=Collectives)
    #: Global rank of the first rank of the sync group.
    _first_of_group: int = field(init=False, default=0)
    _run_ref: Callable[[], Any] = field(init=False, default=_nothing)
    _module_ref: Callable[[], Any] = field(init=False, default=_nothing)
    #: Parameters by name, those with and without `requires_grad` when training began.
    _trained: dict[str, Tensor] = field(init=False, factory=dict)
    _frozen: dict[str, Tensor] = field(init=False, factory=dict)
    #: Attempted optimizer steps; batches in manual optimization. The same number on all ranks.
    steps: int = field(init=False, default=0)
    _num_syncs: int = field(init=False, default=0)
    #: The trained parameters are equal in all teams.
    parameters_in_sync: bool = field(init=False, default=True)
    #: Parameters, buffers and optimizer state are equal in all teams.
    _in_sync: bool = field(init=False, default=True)
    #: This rank's own parameters and buffers while the average has replaced them; otherwise None.
    _own_values: dict[str, Tensor] | None = field(init=False, default=None)

    # --- Overridden by each method of averaging -------------------------------------------------------------------

    def is_sync_step(self) -> bool:
        """Whether to sync now, after step ``self.steps``."""
        raise NotImplementedError

    def sync(self, run: RunContext) -> None:
        """Exchange parameters in place; set ``self.parameters_in_sync`` if they are now equal in all teams."""
        raise NotImplementedError

    def diverges(self) -> bool:
        """Whether the current step makes the parameters of the teams differ."""
        return True

    def before_step(self, run: RunContext) -> None:
        """Called before each optimizer step."""

    def finish_pending_sync(self) -> None:
        """Complete and discard pending communication: all teams now have the average."""

    def reset_sync_state(self) -> None:
        """Reset the state of earlier syncs: the parameters were replaced."""

    def shared_sync_state(self) -> dict[str, Any]:
        """Return the state of earlier syncs that is equal in all teams."""
        return {}

    def load_shared_sync_state(self, state: dict[str, Any]) -> None:
        """Restore what `shared_sync_state` returned."""

    def rank_sync_state(self) -> dict[str, Any]:
        """Return the state of earlier syncs that only this rank has."""
        return {}

    def load_rank_sync_state(self, state: dict[str, Any]) -> None:
        """Restore what `rank_sync_state` returned."""

    # --- The start -----------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def wrap_model(self, run: RunContext) -> Generator[None, torch.nn.Module, torch.nn.Module]:
        if run.stage == "train":
            self._reset_for(run)
        wrapped = yield
        with torch.no_grad():
            tensors = _local(_held(_model(run).named_parameters())) | _local_buffers(run)
            broadcast_from_first(tensors, self.sync_group, run.device)
        return wrapped

    @hookimpl(wrapper=True)
    def wrap_optimizers(self, run: RunContext) -> Generator[None, list[Optimizer], list[Optimizer]]:
        optimizers = yield
        check_optimizers(self.path, optimizers, run)
        parameters = _held(_model(run).named_parameters())
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        return optimizers

    def _reset_for(self, run: RunContext) -> None:
        """Reset the state of an earlier run or module."""
        earlier = self._module_ref()
        self._own_values = None
        if self._run_ref() is run and earlier is run.module:
            return
        if self._run_ref() is run and earlier is not None and not run.owns_loop:
            raise ConfigError(
                f"{self.path} was given a {type(run.module).__name__} after a {type(earlier).__name__}",
                expected="one module in a run, whose replicas are averaged",
                do="combine both in one module whose forward takes either input",
            )
        self._run_ref, self._module_ref = weakref.ref(run), weakref.ref(_model(run))
        self.steps = self._num_syncs = 0
        self.parameters_in_sync = self._in_sync = True
        self.reset_sync_state()

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def step_optimizers(self, optimizers: list[Optimizer], run: RunContext) -> Generator[None, bool, bool]:
        if 0 < len(optimizers) < len(run.optimizers) and not run.manual:
            raise ConfigError(
                f"{self.path} counts steps, and {len(optimizers)} of {len(run.optimizers)} optimizers steps",
                expected="all in one step", do="call run.optimizer_step with a list of them",
            )  # fmt: skip
        self.before_step(run)
        stepped = yield
        if not run.manual:
            self._check_trained(run)
            self._count_step(run)
        return stepped

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_start(self, run: RunContext) -> None:
        if run.manual:
            self.before_step(run)

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_batch_end(self, run: RunContext) -> None:
        # A manual step may run on some ranks only, or while a graph exists that needs the parameters unchanged.
        if run.manual:
            self._count_step(run)

    def _count_step(self, run: RunContext) -> None:
        self._in_sync = False
        self.parameters_in_sync = self.parameters_in_sync and not self.diverges()
        self.steps += 1
        if self.is_sync_step():
            self._check_frozen()
            with torch.no_grad():
                self.sync(run)
            self._num_syncs += 1

    def _check_trained(self, run: RunContext) -> None:
        """Refuse a step of a replica in one process, which waits for no other, if no parameter had a gradient."""
        alone = run.owns_loop and run.peers.world_size == 1
        if alone and all(parameter.grad is None for parameter in self._trained.values() if parameter.requires_grad):
            raise ConfigError(
                f"the loss of rank {run.rank} reaches no trainable parameter, and its model is averaged with others",
                expected="a loss that depends on them", do="return the usual loss multiplied by zero to skip a batch",
            )  # fmt: skip

    def _check_frozen(self) -> None:
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise ConfigError(
                f"{thawed[0]!r} was frozen when training began and is trained now, which {self.path} did not expect",
                expected="the same trainable parameters during the whole fit",
                do="begin with it trainable, or train in two fits",
            )

    def local_parameters(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained parameter, by name, sharing its memory."""
        return _local(self._trained)

    # --- The average in evaluation -------------------------------------------------------------------------------

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_validation_start(self, run: RunContext) -> None:
        self._swap_in_average(run)

    @hookimpl(optionalhook=True, trylast=True)
    def on_validation_end(self, run: RunContext) -> None:
        self._restore_own_values(run)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    @hookimpl(optionalhook=True, tryfirst=True)
    def on_train_end(self, run: RunContext) -> None:
        if self._in_sync:
            return
        self._swap_in_average(run)
        self._own_values, self.parameters_in_sync, self._in_sync = None, True, True
        self.finish_pending_sync()
        counts = {name: buffer for name, buffer in _local_buffers(run).items() if not is_averaged(buffer)}
        with torch.no_grad():
            broadcast_from_first(counts, self.sync_group, run.device)
        if self._num_syncs == 0 and run.is_global_zero:
            warnings.warn(
                f"{self.path} trained {self.steps} steps without a sync, and averaged the models only at the end; "
                "set a shorter period",
                stacklevel=2,
            )

    def _swap_in_average(self, run: RunContext) -> None:
        """Replace this rank's parameters and buffers by the average, and keep its own values. Collective."""
        if self._own_values is not None or self._module_ref() is not run.module:
            return
        self._check_frozen()
        with torch.inference_mode(False), torch.no_grad():
            tensors = self._diverging_tensors(run)
            self._own_values = on_cpu(tensors)
            parameters = {name: tensor for name, tensor in tensors.items() if name in self._trained}
            buffers = {name: tensor for name, tensor in tensors.items() if name not in self._trained}
            average_in_place(parameters, self.sync_group, run.device)
            average_in_place(buffers, self.sync_group, run.device, mean_where_different)

    def _restore_own_values(self, run: RunContext) -> None:
        if self._own_values is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            tensors = self._diverging_tensors(run)
            for name, tensor in self._own_values.items():
                tensors[name].copy_(tensor)
        self._own_values = None

    def _diverging_tensors(self, run: RunContext) -> dict[str, Tensor]:
        """Return the trained parameters and the buffers that may differ between teams now, by name."""
        if self._in_sync:
            return {}
        buffers = {name: buffer for name, buffer in _local_buffers(run).items() if is_averaged(buffer)}
        return buffers if self.parameters_in_sync else self.local_parameters() | buffers

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def model_state(self, run: RunContext) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        if self._own_values is not None or self._in_sync or self._module_ref() is not run.module:
            return self._without_duplicate_shards((yield), run)
        self._swap_in_average(run)
        try:
            state = yield
            return self._without_duplicate_shards(copied_if_shared(state, self._diverging_tensors(run)), run)
        finally:
            self._restore_own_values(run)

    @hookimpl(wrapper=True)
    def load_model_state(self) -> Generator[None, bool, bool]:
        done = yield
        self.parameters_in_sync, self._in_sync, self._own_values = True, True, None
        self.reset_sync_state()
        return done

    @hookimpl(wrapper=True)
    def optimizer_state(self, optimizer: Optimizer, run: RunContext) -> Generator[None, dict[str, Any], dict[str, Any]]:
        with torch.no_grad():
            moments = averaged_moments(optimizer, self.sync_group)
            own = on_cpu(moments)
            average_in_place(moments, self.sync_group, run.device)
            try:
                state = yield
                return self._without_duplicate_shards(copied_if_shared(state, moments), run)
            finally:
                for name, tensor in own.items():
                    moments[name].copy_(tensor)

    def _without_duplicate_shards(self, state: dict[str, Any], run: RunContext) -> dict[str, Any]:
        """Return `state` without its shards on all but the first team if it is saved in shards, which teams share."""
        offered: dict[str, Any] = state if run.whole_state or self.sync_group.rank == 0 else without_shards(state)
        return offered

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "syncs": self._num_syncs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._num_syncs = state["steps"], state["syncs"]

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        """Return this rank's own values."""
        if not self.exact_resume:
            return {}
        return {
            "num_teams": self.sync_group.world_size,
            "parameters_in_sync": self.parameters_in_sync,
            "in_sync": self._in_sync,
            "values": on_cpu(self._diverging_tensors(run) if self._own_values is None else self._own_values),
            "optimizers": [local_state(optimizer) for optimizer in run.optimizers],
            "shared_sync_state": on_cpu(self.shared_sync_state()) if self.sync_group.rank == 0 else {},
            "rank_sync_state": on_cpu(self.rank_sync_state()),
        }

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        """Restore this rank's own values; with other ranks or teams than saved, keep the average. Collective."""
        if len(states) != run.world_size or not all(states):
            return
        mine = states[run.rank]
        if run.collectives.any(not self._is_compatible(mine, run)):
            return
        self.parameters_in_sync, self._in_sync = mine["parameters_in_sync"], mine["in_sync"]
        with torch.no_grad():
            tensors = self._diverging_tensors(run)
            for name, tensor in mine["values"].items():
                tensors[name].copy_(tensor)
            for optimizer, entries in zip(run.optimizers, mine["optimizers"], strict=True):
                restore_local_state(optimizer, entries)
            self.load_shared_sync_state(on_device(run.device, states[self._first_of_group]["shared_sync_state"]))
            self.load_rank_sync_state(on_device(run.device, mine["rank_sync_state"]))

    def _is_compatible(self, state: dict[str, Any], run: RunContext) -> bool:
        """Whether a rank's saved values fit this rank: the same number of teams, and shards of the same shapes."""
        own = self.local_parameters() | _local_buffers(run)
        return state["num_teams"] == self.sync_group.world_size and all(
            name in own and own[name].shape == tensor.shape for name, tensor in state["values"].items()
        )

    @hookimpl
    def teardown(self) -> None:
        self._run_ref, self._module_ref, self._own_values = _nothing, _nothing, None
        self._trained, self._frozen, self.sync_group = {}, {}, Collectives()
        self.reset_sync_state()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs made it


def _held(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return those of the tensors by name that this rank has: others may belong to other stages of a pipeline."""
    return {name: tensor for name, tensor in named if not tensor.is_meta}


def _local(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor, by name, sharing its memory."""
    return {name: local_tensor(tensor) for name, tensor in tensors.items()}


def _local_buffers(run: RunContext) -> dict[str, Tensor]:
    return _local(_held(_model(run).named_buffers()))


def _model(run: RunContext) -> torch.nn.Module:
    assert run.module is not None, "set before wrap_model"
    return run.module
