"""Models that go their own ways between two meetings: what is then shown, saved and resumed.

[Note: one model of several]
Processes form *teams*. Within a team the model is one, replicated or sharded by whatever trains there. A process talks
*across* the teams to those that hold the same part of the model. An optimizer step leads the teams' models apart; a
*meeting*, every so many steps, exchanges parameters.

Where one model is wanted between two meetings, it is the average of them all: parameters, and floating-point buffers
(running statistics), of which those that are the same everywhere stay as they are. It is what validation, test and
predict see, what a checkpoint holds, and what every process has at the end of a fit. Optimizer state is saved as its
average, too. So any strategy can go on from a checkpoint, with any number of processes.

Next to the one model a checkpoint keeps what each process had of its own, so that the same number of processes go on
as if they had never stopped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import Collectives, Plugin, hookimpl
from stratagem.api.optimizers import needs_closure
from stratagem.api.options import options
from stratagem.errors import ConfigError
from stratagem_outer.messages import follow_first, local, mean_where_different, means

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.optim import Optimizer

    from stratagem.api import RunContext

#: Optimizers that themselves talk to all processes.
_DISTRIBUTED_OPTIMIZERS = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer"}


def _nothing() -> None:
    return None


@define(eq=False, kw_only=True)
class Apart(Plugin):
    """A plugin under which models differ for a while; see [Note: one model of several]."""

    #: How an error names the plugin.
    path: ClassVar[str] = ""

    #: Checkpoints also keep every process's own model and optimizer state, for a resumed run to equal one that never
    #: stopped: as many times as large. Without, a resumed run begins with the average on all processes.
    exact_resume: bool = True

    #: Those that hold the same part of the model, one of each team.
    _across: Collectives = field(init=False, factory=Collectives)
    #: Rank among all of the first of them.
    _first: int = field(init=False, default=0)
    _run: Callable[[], Any] = field(init=False, default=_nothing)
    _module: Callable[[], Any] = field(init=False, default=_nothing)
    #: Parameters that are trained, by name, and those that are not.
    _trained: dict[str, Tensor] = field(init=False, factory=dict)
    _frozen: dict[str, Tensor] = field(init=False, factory=dict)
    #: Optimizer steps, attempted ones; batches where a module steps by hand. All processes make equally many.
    _steps: int = field(init=False, default=0)
    _meetings: int = field(init=False, default=0)
    #: The trained parameters are the same everywhere; and all else is, too.
    _met: bool = field(init=False, default=True)
    _alike: bool = field(init=False, default=True)
    #: What this process has of its own, while the one model is in its place.
    _own: dict[str, Tensor] | None = field(init=False, default=None)

    # --- What a method of meeting says ---------------------------------------------------------------------------

    def _meets(self) -> bool:
        """Whether the models meet now, after step ``self._steps``."""
        raise NotImplementedError

    def _meet(self, run: RunContext) -> None:
        """Exchange parameters, in place; set ``self._met`` if they are the same everywhere now."""
        raise NotImplementedError

    def _drifts(self) -> bool:
        """Whether the step that is made now leads the models apart."""
        return True

    def _before_step(self, run: RunContext) -> None:
        """Look at the parameters before they are stepped."""

    def _settle(self) -> None:
        """Drop what is under way: all models have become one."""

    def _forget(self) -> None:
        """Drop what is remembered of earlier meetings: the model is another one."""

    def _memory(self) -> dict[str, Any]:
        """Return what is remembered of earlier meetings, the same in all teams, as tensors by name."""
        return {}

    def _remember(self, memory: dict[str, Any]) -> None:
        """Put back what `_memory` returned."""

    def _own_memory(self) -> dict[str, Any]:
        """Return what this process alone remembers."""
        return {}

    def _remember_own(self, memory: dict[str, Any]) -> None:
        """Put back what `_own_memory` returned."""

    # --- The start -----------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def wrap_model(self, run: RunContext) -> Generator[None, torch.nn.Module, torch.nn.Module]:
        if run.stage == "train":
            self._begin(run)
        wrapped = yield
        with torch.no_grad():
            tensors = {**dict(_model(run).named_parameters()), **dict(_model(run).named_buffers())}
            follow_first({name: local(tensor) for name, tensor in tensors.items()}, self._across, run.device)
        return wrapped

    @hookimpl(wrapper=True)
    def wrap_optimizers(self, run: RunContext) -> Generator[None, list[Optimizer], list[Optimizer]]:
        optimizers = yield
        self._check_optimizers(optimizers, run)
        parameters = dict(_model(run).named_parameters())
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        return optimizers

    def _begin(self, run: RunContext) -> None:
        """Forget what belonged to another run or module."""
        earlier = self._module()
        self._own = None
        if self._run() is run and earlier is run.module:
            return
        if self._run() is run and earlier is not None and not run.owns_loop:
            raise ConfigError(
                f"{self.path} was given a {type(run.module).__name__} after a {type(earlier).__name__}",
                expected="one module in a run: which models would meet?",
                do="put both into one, with a forward that takes either",
            )
        self._run, self._module = weakref.ref(run), weakref.ref(_model(run))
        self._steps = self._meetings = 0
        self._met = self._alike = True
        self._forget()

    def _check_optimizers(self, optimizers: list[Optimizer], run: RunContext) -> None:
        for optimizer in optimizers:
            name = type(optimizer).__name__
            if needs_closure(optimizer):
                raise ConfigError(
                    f"{self.path} was given {name}, which evaluates the model several times a step",
                    expected="an optimizer that steps with the gradients that are there, such as AdamW",
                    do="choose one, or train without a meeting of models",
                )
            if _DISTRIBUTED_OPTIMIZERS & {cls.__name__ for cls in type(optimizer).__mro__}:
                raise ConfigError(
                    f"{self.path} was given {name}, which itself makes all processes' parameters the same",
                    expected="an optimizer of this process's own",
                    do="use the one that it wraps",
                )
        if len(optimizers) > 1 and not run.manual:
            raise ConfigError(
                f"{self.path} was given {len(optimizers)} optimizers by a loop of your own",
                expected="one: between two of them nobody knows whether the models may meet",
                do="train with a Trainer and automatic_optimization = False",
            )
        if run.manual and run.shards_parameters:
            raise ConfigError(
                f"{self.path} around sharded parameters was given {type(run.module).__name__}, which optimizes by hand",
                expected="automatic optimization: parameters that are gathered while the models meet would be old ones",
                do="set automatic_optimization = True, or train within a team with replicas",
            )

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: RunContext) -> Generator[None, bool, bool]:
        self._before_step(run)
        stepped = yield
        if not run.manual:
            self._count_step(run)
        return stepped

    @hookimpl(tryfirst=True)
    def on_train_start(self, run: RunContext) -> None:
        if run.manual:
            self._before_step(run)

    @hookimpl(tryfirst=True)
    def on_train_batch_end(self, run: RunContext) -> None:
        # Whoever steps by hand may do so on some ranks, or with a graph at hand that parameters must not change under.
        if run.manual:
            self._count_step(run)

    def _count_step(self, run: RunContext) -> None:
        self._alike = False
        self._met = self._met and not self._drifts()
        self._steps += 1
        if self._meets():
            self._check_frozen()
            with torch.no_grad():
                self._meet(run)
            self._meetings += 1

    def _check_frozen(self) -> None:
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise ConfigError(
                f"{thawed[0]!r} was frozen when training began and is trained now, which {self.path} did not expect",
                expected="the same parameters from beginning to end",
                do="begin with it trainable, or train in two fits",
            )

    def _local(self) -> dict[str, Tensor]:
        """Return the trained parameters, as far as they are here, in their own memory."""
        return {name: local(parameter) for name, parameter in self._trained.items()}

    # --- One model of several ------------------------------------------------------------------------------------

    @hookimpl(tryfirst=True)
    def on_validation_start(self, run: RunContext) -> None:
        self._bring_together(run)

    @hookimpl(trylast=True)
    def on_validation_end(self, run: RunContext) -> None:
        self._part_again(run)

    @hookimpl(tryfirst=True)
    def on_test_start(self, run: RunContext) -> None:
        self._bring_together(run)

    @hookimpl(trylast=True)
    def on_test_end(self, run: RunContext) -> None:
        self._part_again(run)

    @hookimpl(tryfirst=True)
    def on_predict_start(self, run: RunContext) -> None:
        self._bring_together(run)

    @hookimpl(trylast=True)
    def on_predict_end(self, run: RunContext) -> None:
        self._part_again(run)

    @hookimpl(tryfirst=True)
    def on_train_end(self, run: RunContext) -> None:
        if self._alike:
            return
        self._bring_together(run)
        self._own, self._met, self._alike = None, True, True
        self._settle()
        counts = {name: buffer for name, buffer in _model(run).named_buffers() if not _is_averaged(buffer)}
        with torch.no_grad():
            follow_first({name: local(buffer) for name, buffer in counts.items()}, self._across, run.device)
        if self._meetings == 0 and run.is_global_zero:
            warnings.warn(
                f"{self.path} trained {self._steps} steps without a meeting, and averaged the models at the end alone: "
                "a shorter period makes it meet",
                stacklevel=2,
            )

    def _bring_together(self, run: RunContext) -> None:
        """Put the one model in the place of this process's own. Collective."""
        if self._own is not None or self._module() is not run.module:
            return
        self._check_frozen()
        with torch.inference_mode(False), torch.no_grad():
            apart = self._apart(run)
            self._own = _on_cpu(apart)
            parameters = {name: tensor for name, tensor in apart.items() if name in self._trained}
            buffers = {name: tensor for name, tensor in apart.items() if name not in self._trained}
            for name, mean in means(parameters, self._across, run.device):
                apart[name].copy_(mean)
            for name, mean in means(buffers, self._across, run.device, mean_where_different):
                apart[name].copy_(mean)

    def _part_again(self, run: RunContext) -> None:
        if self._own is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            apart = self._apart(run)
            for name, tensor in self._own.items():
                apart[name].copy_(tensor)
        self._own = None

    def _apart(self, run: RunContext) -> dict[str, Tensor]:
        """Return what may differ between teams now, by name: of the trained parameters and of the buffers."""
        if self._alike:
            return {}
        buffers = {name: local(buffer) for name, buffer in _model(run).named_buffers() if _is_averaged(buffer)}
        return buffers if self._met else self._local() | buffers

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def model_state(self, run: RunContext) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        if self._own is not None or self._alike or self._module() is not run.module:
            return self._offered((yield), run)
        self._bring_together(run)
        try:
            state = yield
            return self._offered(_apart_from(state, self._apart(run)), run)
        finally:
            self._part_again(run)

    @hookimpl(wrapper=True)
    def load_model_state(self) -> Generator[None, bool, bool]:
        done = yield
        self._met, self._alike, self._own = True, True, None
        self._forget()
        return done

    @hookimpl(wrapper=True)
    def optimizer_state(self, optimizer: Optimizer, run: RunContext) -> Generator[None, dict[str, Any], dict[str, Any]]:
        with torch.no_grad():
            moments = self._moments(optimizer)
            own = _on_cpu(moments)
            for name, mean in means(moments, self._across, run.device):
                moments[name].copy_(mean)
            try:
                state = yield
                return self._offered(_apart_from(state, moments), run)
            finally:
                for name, tensor in own.items():
                    moments[name].copy_(tensor)

    def _offered(self, state: dict[str, Any], run: RunContext) -> dict[str, Any]:
        """Leave shards to the first team, where a checkpoint format takes them: every team has the same ones."""
        offered: dict[str, Any] = state if run.whole_state or self._across.rank == 0 else _without_shards(state)
        return offered

    def _moments(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the optimizer's tensors that are averaged: like a parameter in shape, and there in all teams."""
        found = {
            f"{number} {key}": local(value)
            for number, parameter in enumerate(_parameters(optimizer))
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and _is_averaged(value) and key != "step"
        }
        signs = {name: (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in found.items()}
        everywhere = set.intersection(*map(set, self._across.all_gather_object(list(signs.values()))))
        return {name: found[name] for name in found if signs[name] in everywhere}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "meetings": self._meetings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._meetings = state["steps"], state["meetings"]

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        """Return what this process has of its own."""
        if not self.exact_resume:
            return {}
        return {
            "teams": self._across.world_size,
            "met": self._met,
            "alike": self._alike,
            "values": _on_cpu(self._apart(run) if self._own is None else self._own),
            "optimizers": [_remembered(optimizer) for optimizer in run.optimizers],
            "memory": _on_cpu(self._memory()) if self._across.rank == 0 else {},
            "own_memory": _on_cpu(self._own_memory()),
        }

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        """Take what this rank had of its own; where the processes are others, the average stands. Collective."""
        if len(states) != run.world_size or not all(states):
            return
        mine = states[run.rank]
        if run.collectives.any(not self._fits(mine, run)):
            return
        self._met, self._alike = mine["met"], mine["alike"]
        with torch.no_grad():
            apart = self._apart(run)
            for name, tensor in mine["values"].items():
                apart[name].copy_(tensor)
            for optimizer, entries in zip(run.optimizers, mine["optimizers"], strict=True):
                _put_back(optimizer, entries)
            self._remember(_on(run.device, states[self._first]["memory"]))
            self._remember_own(_on(run.device, mine["own_memory"]))

    def _fits(self, state: dict[str, Any], run: RunContext) -> bool:
        """Whether what a rank had of its own can be this one's: as many teams, which divide the model alike."""
        own = self._local() | {name: local(buffer) for name, buffer in _model(run).named_buffers()}
        return state["teams"] == self._across.world_size and all(
            name in own and own[name].shape == tensor.shape for name, tensor in state["values"].items()
        )

    @hookimpl
    def teardown(self) -> None:
        self._run, self._module, self._own = _nothing, _nothing, None
        self._trained, self._frozen, self._across = {}, {}, Collectives()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs made it


def _model(run: RunContext) -> torch.nn.Module:
    assert run.module is not None, "it is known before it is wrapped"
    return run.module


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# --- Tensors in containers ---------------------------------------------------------------------------------------


def _apart_from(state: dict[str, Any], live: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `state` with copies, on the CPU, of the tensors in the memory of `live`, which is about to change."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in live.values()}

    def kept(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_meta:
            return _on_cpu(value) if local(value).untyped_storage().data_ptr() in memory else value
        return {key: kept(each) for key, each in value.items()} if isinstance(value, dict) else value

    return {key: kept(value) for key, value in state.items()}


def _without_shards(value: Any) -> Any:
    """Return nested `value` with sharded tensors on the meta device: other ranks have them."""
    if isinstance(value, Tensor) and hasattr(value, "to_local"):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return {key: _without_shards(each) for key, each in value.items()} if isinstance(value, dict) else value


def _on_cpu(value: Any) -> Any:
    """Return nested `value` with tensors copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: _on_cpu(each) for key, each in value.items()} if isinstance(value, dict) else value


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return {key: _on(device, each) for key, each in value.items()} if isinstance(value, dict) else value


# --- What an optimizer remembers ---------------------------------------------------------------------------------


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _remembered(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return this process's own part of the optimizer's state, for each parameter in turn."""
    return [
        {key: local(value).to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in entry.items()}
        for entry in (optimizer.state.get(parameter, {}) for parameter in _parameters(optimizer))
    ]


def _put_back(optimizer: Optimizer, entries: list[dict[str, Any]]) -> None:
    """Overwrite the state of `optimizer`, which was loaded as a whole before, with what `_remembered` returned."""
    for parameter, entry in zip(_parameters(optimizer), entries, strict=True):
        if not entry:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for key, value in entry.items():
            there = state.get(key)
            if isinstance(there, Tensor):
                local(there).copy_(value)
            else:
                state[key] = value.to(parameter.device) if isinstance(value, Tensor) else value
