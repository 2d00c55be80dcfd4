"""DeepSpeed's engine as a module to call, and how a model and an optimizer become one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stratagem.errors import ConfigError
from stratagem_transforms.normalization import match_inputs
from stratagem_deepspeed.gradient_guard import GradientsElsewhere
from stratagem_deepspeed.manual_writes import WrittenByHand
from stratagem_deepspeed.state import masters, put_masters
from stratagem_deepspeed.trace import SharedTrace, TraceOfEngine

if TYPE_CHECKING:
    from stratagem.api import RunContext

_AS_IT_IS = contextlib.nullcontext()
#: Where a module remembers what wrapped it last.
_LATEST = "_stratagem_engine"
#: Where it keeps the masters of its 16-bit parameters from one engine to the next.
_MASTERS = "_stratagem_masters"
#: Optimizers for which a layer is more than its numbers.
_WHOLE_LAYERS = {"adafactor", "muon", "shampoo", "soap", "lars", "lamb", "novograd"}


class EngineModule(nn.Module):
    """What a run calls: the user's steps inside DeepSpeed's engine, or by themselves as long as there is none."""

    #: DeepSpeed's, which has no types.
    engine: Any
    user: nn.Module

    def __init__(self, step: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self.step = _Autocast(step, dtype, device) if dtype is not None else step
        self.dtype = dtype
        self.dtypes = [(parameter, parameter.dtype) for parameter in step.parameters()]
        #: What the next step will clip by, as measured for it.
        self.norms: list[torch.Tensor] | None = None
        self.arrivals: Arrivals | None = None
        #: At stage 3 on several ranks: which layers all of them compute.
        self.traced: TraceOfEngine | None = None
        #: At stages 1 to 3: weights that a program has written.
        self.written: WrittenByHand | None = None
        #: At stages 2 and 3: refuses those who look for gradients at the parameters.
        self.gradients: GradientsElsewhere | None = None
        #: There was a backward since the last step.
        self._differentiated = False
        self._frozen: set[int] = set()
        #: At stage 0, what is trained and in no group: its gradient counts for nothing.
        self._outside: list[nn.Parameter] = []
        #: For linear layers that do not save their weights for backward, which would keep every gathered one.
        self._linear: Any = None
        # Not as submodules: the engine holds this model's steps itself.
        self.__dict__["engine"], self.__dict__["user"] = None, step.module
        step.module.__dict__[_LATEST] = weakref.ref(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        engine = self.engine
        if engine is not None:
            if self.traced is not None:
                self.traced.trace.begin(arguments[0])
            with self._sparing():
                return engine(*arguments, **options)
        self._check_whole()
        return self.step(*arguments, **options)

    @property
    def zero(self) -> Any:
        """ZeRO's optimizer, if there is one."""
        optimizer = getattr(self.engine, "optimizer", None)
        return optimizer if hasattr(optimizer, "optimizer") else None

    def _check_whole(self) -> None:
        if any(hasattr(parameter, "ds_id") for parameter in self.step.parameters()):
            raise ConfigError(
                "the model is shared out over the processes, and no engine gathers it: another run took it over, or "
                "this one got no optimizer",
                expected="a fit, or an evaluation, of the run that uses it",
            )

    def start(self, deepspeed: Any, config: dict[str, Any], optimizer: Any, run: RunContext) -> None:
        """Make the engine; without an optimizer it only gathers what a forward needs."""
        trained = [parameter for parameter in self.step.parameters() if parameter.requires_grad]
        self._frozen = {id(parameter) for parameter in self.step.parameters() if not parameter.requires_grad}
        accelerator = deepspeed.accelerator.get_accelerator()
        groups = None if optimizer is None else optimizer.param_groups  # ZeRO puts its own partitions there
        inside = {id(each) for group in groups or () for each in group["params"]}
        with contextlib.ExitStack() as stack:
            # All ranks have the same parameters already, and it stumbles over those without dimensions.
            stack.enter_context(_replaced(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda _: None))
            if accelerator.device_name() == "cpu":  # torch can, if the processor cannot
                stack.enter_context(_replaced(accelerator, "is_fp16_supported", lambda: True))
            self.__dict__["engine"], *_ = deepspeed.initialize(
                model=self.step, optimizer=optimizer, model_parameters=trained, config=config
            )
        self._clip(config["gradient_clipping"])
        if self.dtype is not None and self._keeps_masters() and (kept := self.user.__dict__.pop(_MASTERS, None)):
            put_masters(kept, self.engine.optimizer, self.dtype)
        zero = config["zero_optimization"]
        if zero["stage"] == 0 and optimizer is not None:
            self._outside = [parameter for parameter in trained if id(parameter) not in inside]
        if zero["stage"] == 2 and self.zero is not None:
            _let_zero_grad_drop_all(self.zero)
        if zero["stage"] == 3 and zero.get("memory_efficient_linear", True):
            from deepspeed.runtime.zero.linear import zero3_linear_wrap

            self._linear = zero3_linear_wrap
        if self.zero is not None:
            self.written = WrittenByHand(self.zero, self.user)
            if zero["stage"] > 1:
                self.gradients = GradientsElsewhere(self.user, zero["stage"], inside if groups is not None else None)
        if zero["stage"] == 3:
            _refuse_gradients_of_gradients(self.engine)
        if run.world_size > 1 and zero["stage"] == 3:
            self.traced = TraceOfEngine(SharedTrace(run), self.engine, self.user)
            self.traced.trace.watch()
        if run.world_size > 1 and zero["stage"] in (1, 2) and optimizer is not None:
            self.arrivals = Arrivals(trained, run)
            if zero["stage"] == 2:
                self._check_each_backward()

    def check_thawed(self) -> None:
        """Refuse a parameter that was frozen when the engine was made, and is to be trained now: it never is."""
        for name, parameter in self.user.named_parameters():
            if parameter.requires_grad and id(parameter) in self._frozen:
                raise ConfigError(
                    f"{name!r} was frozen when training began and is trained now, which DeepSpeed does not notice",
                    expected="the same parameters from beginning to end of a fit",
                    do="begin with it trainable, or train in two fits",
                )

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate `loss`; what is computed again is computed as it was."""
        with self._sparing():
            self.engine.backward(loss)
        self._differentiated = True

    def _check_each_backward(self) -> None:
        """Stage 2 sends what backward has left as soon as it is over: compare before."""
        finish, arrivals = self.engine._backward_epilogue, self.arrivals
        assert arrivals is not None, "made before"

        def compare_and_finish() -> None:
            arrivals.compare(ordered=True)
            finish()

        self.engine.__dict__["_backward_epilogue"] = compare_and_finish

    def _compare_arrivals(self) -> None:
        if self.arrivals is not None and not self.engine.zero_optimization_partition_gradients():
            self.arrivals.compare(ordered=False)  # stage 1 sends once in a window

    def _sparing(self) -> contextlib.AbstractContextManager[None]:
        return _AS_IT_IS if self._linear is None else _replaced(nn.functional, "linear", self._linear)

    def clip(self, max_norm: float) -> Any:
        """Have the next step clip; return the norm before clipping.

        The engine averages, measures and clips when it steps. Here it averages and measures before, and not again.
        """
        engine = self.engine
        if self.norms is None:  # it may have been asked before, to measure alone
            with _AS_IT_IS if self.gradients is None else self.gradients.lifted():
                self._finish_window()
                self.norms = _norms(engine)
        self._clip(max_norm)
        return _combined(self.norms) / getattr(engine.optimizer, "loss_scale", 1.0)

    def _finish_window(self) -> None:
        """Average what the batches of this window have left."""
        engine = self.engine
        self._compare_arrivals()
        for parameter in self._outside:
            parameter.grad = None
        engine._running_engine_step = True  # the end of a window, which is when gradients are averaged
        if not engine.zero_optimization_partition_gradients():
            engine.allreduce_gradients()
        else:
            engine.optimizer.finalize_gradient_accumulation_boundary()

    def step_optimizer(self) -> bool:
        """Step; return whether parameters changed."""
        engine, norms = self.engine, self.norms
        if not self._differentiated:
            raise ConfigError(
                "an optimizer step was asked for and there was no backward since the last one",
                expected="a backward before each step",
                do="call backward of the run first, or skip the step",
            )
        self.norms, self._differentiated = None, False
        if self.written is not None:
            self.written.take_over()
        if self.gradients is not None:
            self.gradients.check_unset()
        if norms is None:
            self._compare_arrivals()
            engine.step()
        else:
            with _as_it_is(engine, norms):
                engine.step()
            self._clip(engine.config["gradient_clipping"])
        _forget_gradients(engine.optimizer)
        if self.written is not None:
            self.written.remember(stepped=True)
        return bool(engine.was_step_applied())

    def _clip(self, max_norm: float) -> None:
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def _keeps_masters(self) -> bool:
        return self.dtype is not None and self.zero is not None

    def cast(self) -> None:
        """Have parameters in the engine's 16 bits where no engine is needed."""
        if self.dtype is not None:
            for parameter, dtype in self.dtypes:
                if dtype.is_floating_point:
                    parameter.data = parameter.data.to(self.dtype)

    def stop(self, *, keep_masters: bool = False) -> None:
        """Take the engine's hooks off the model, and leave its parameters as wide as they were. Safe to call twice.

        Args:
            keep_masters: leave the masters of 16-bit parameters for the next engine: it would begin with rounded ones.
        """
        if self.written is not None:
            self.written.stop()
            self.written = None
        if self.gradients is not None:
            self.gradients.stop()
            self.gradients = None
        if keep_masters and self._keeps_masters():
            self.user.__dict__[_MASTERS] = masters(self.engine.optimizer)
        engine, self.__dict__["engine"] = self.engine, None
        if self.traced is not None:
            self.traced.stop()
            self.traced = None
        if engine is not None:
            if hasattr(engine.optimizer, "empty_partition_cache"):
                engine.optimizer.empty_partition_cache()  # what it has begun to gather nobody else would finish
                _forget_models()
            engine.destroy()
            engine.__dict__["destroy"] = _nothing  # or its end, some time, would unmake what the next engine has made
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            for parameter in self.step.parameters():
                parameter.__dict__.pop("_z3_optimizer", None)  # it would keep the engine for as long as the model lives
        for parameter, dtype in self.dtypes:
            if parameter.dtype != dtype and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        if self.arrivals is not None:
            self.arrivals.stop()
            self.arrivals = None
        if isinstance(self.step, _Autocast):
            self.step.stop()


class EngineOptimizer(torch.optim.Optimizer):
    """ZeRO's optimizer as one of torch's, which schedulers insist on; everything is ZeRO's."""

    def __init__(self, zero: Any) -> None:  # of torch's, nothing is made: groups and state are ZeRO's
        # Schedulers warn where they see no step; the run steps ZeRO's directly.
        self.__dict__["zero"], self.__dict__["_opt_called"] = zero, True

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.zero.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.zero.state

    def step(self, closure: Any = None) -> Any:
        return self.zero.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.zero.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.zero.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["zero"], name)


def check_elementwise(optimizer: Any) -> None:
    """Refuse an optimizer that looks at whole matrices or layers: ZeRO cuts them up and lays them end to end.

    Raises:
        ConfigError: it is known to do so.
    """
    if type(optimizer).__name__.lower() in _WHOLE_LAYERS and not type(optimizer).__module__.startswith("deepspeed."):
        raise ConfigError(
            f"configure_optimizers returned {type(optimizer).__name__}, which looks at whole layers, and ZeRO hands it "
            "pieces of them",
            expected="an optimizer that treats each number by itself, such as AdamW",
            do='choose it, or a strategy that steps whole parameters, such as "ddp"',
        )


def check_groups(optimizer: Any) -> None:
    """Refuse a parameter group in which nothing is trained: ZeRO wants something of each to share out.

    Raises:
        ConfigError: there is one.
    """
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise ConfigError(
                f"parameter group {number} of {type(optimizer).__name__} has no parameter that is trained",
                expected="at least one in each group, which ZeRO shares out",
                do="leave the group out of configure_optimizers",
            )


def check_tested(optimizer: Any, config: dict[str, Any], origin: str) -> None:
    """Refuse an optimizer that DeepSpeed would refuse, with what to write where.

    Raises:
        ConfigError: the state of such an optimizer was never tried cut up, and the configuration does not allow that.
    """
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    if not config.get("zero_allow_untested_optimizer") and not is_zero_supported_optimizer(optimizer):
        raise ConfigError(
            f"configure_optimizers returned {type(optimizer).__name__}, which DeepSpeed has not tried with ZeRO",
            expected="Adam or AdamW",
            do=f'set "zero_allow_untested_optimizer": true in {origin}; it holds for any optimizer that treats '
            "each number by itself",
        )


class Arrivals:
    """Which parameters backward gave gradients to, in order.

    Stages 1 and 2 add up over the ranks what lies at the same place of their buffers: gradients of other parameters, if
    ranks use different ones, and nobody would notice.
    """

    def __init__(self, parameters: list[nn.Parameter], run: RunContext) -> None:
        self._run, self._order = run, list[int]()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, index))
            for index, parameter in enumerate(parameters)
        ]

    def _arrived(self, index: int, _: torch.Tensor) -> None:
        self._order.append(index)

    def compare(self, *, ordered: bool) -> None:
        """Make sure that all ranks have seen the same ones since the last time. Collective.

        Raises:
            ConfigError: they have not; on every rank.
        """
        seen = self._order if ordered else sorted(set(self._order))
        self._order = []
        mine = int.from_bytes(hashlib.sha256(repr(seen).encode()).digest()[:7], "big")
        # A CPU tensor, which does not wait for a GPU; unchecked, as every rank does this in each backward.
        extremes = self._run.collectives.unchecked.all_reduce(torch.tensor([mine, -mine]), "max").tolist()
        if extremes[0] != -extremes[1]:
            order = ", in the same order" if ordered else ""
            raise ConfigError(
                f"ranks used different parameters in one step{order and ', or in another order'}, and DeepSpeed would "
                "add up gradients of one with those of another",
                expected=f"a loss that uses the same parameters on every rank{order}",
                do='add the others with a factor of zero, or choose strategy="ddp_find_unused_parameters_true"',
            )

    def stop(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()


def _refuse_gradients_of_gradients(engine: Any) -> None:
    """Refuse a backward that is differentiated: its graph refers to parameters that stage 3 frees at once."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    fetch = offload.pre_sub_module_backward_function

    def check_and_fetch(layer: nn.Module) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a gradient is computed with create_graph=True, and stage 3 frees the parameters that its graph needs",
                expected="a stage below 3, or another strategy, for gradients of gradients",
                do='choose strategy="deepspeed_stage_2" or strategy="fsdp"',
            )
        fetch(layer)

    offload.__dict__["pre_sub_module_backward_function"] = check_and_fetch


def _let_zero_grad_drop_all(zero: Any) -> None:
    """At stage 2 gradients that were sent are kept elsewhere than at their parameters, where `zero_grad` looks."""
    zero_grad, before_any = zero.zero_grad, zero.micro_step_id

    def drop_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        zero.micro_step_id = before_any
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids.clear()

    zero.zero_grad = drop_all


def _forget_gradients(zero: Any) -> None:
    """Zero what ZeRO keeps of gradients after a step: it would step a parameter again that gets none in the next."""
    kept = [getattr(zero, "grad_partitions_flat_buffer", None)]
    if getattr(zero, "cpu_offload", False):
        kept += [flat.grad for flat in zero.single_partition_of_fp32_groups]
        kept += getattr(zero, "accumulated_grads_in_cpu", {}).values()
    if getattr(zero, "offload_optimizer", False):
        kept += [flat.grad for flat in zero.fp32_partitioned_groups_flat]
    for tensor in kept:
        if tensor is not None:
            tensor.zero_()


# --- Clipping ----------------------------------------------------------------------------------------------------


def _norms(engine: Any) -> list[torch.Tensor]:
    """Return what the norm is made of, times the loss scale: one over all ranks for each piece that is stepped."""
    zero = engine.optimizer
    if hasattr(zero, "_get_norm_groups"):
        groups: list[torch.Tensor] = zero._get_norm_groups()
        return groups
    if hasattr(zero, "scaled_global_norm"):
        return [zero.scaled_global_norm()]
    return [torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])]


def _combined(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return one norm for all; DeepSpeed says -1 for one that is not finite."""
    device = next((norm.device for norm in norms if isinstance(norm, torch.Tensor)), None)
    each = torch.stack([torch.as_tensor(norm, dtype=torch.float32, device=device) for norm in norms]).cpu()
    return torch.linalg.vector_norm(each) if bool((each >= 0).all()) else torch.tensor(torch.inf)


@contextlib.contextmanager
def _as_it_is(engine: Any, norms: list[torch.Tensor]) -> Iterator[None]:
    """Have the step take gradients as they are, and their norms as they were measured."""
    zero = engine.optimizer
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(engine, "enable_backward_allreduce", False))
        if engine.zero_optimization_partition_gradients():
            stack.enter_context(_replaced(zero, "finalize_gradient_accumulation_boundary", lambda: None))
        if hasattr(zero, "_get_norm_groups"):
            stack.enter_context(_replaced(zero, "_get_norm_groups", lambda: norms))
        elif hasattr(zero, "scaled_global_norm"):
            stack.enter_context(_replaced(zero, "scaled_global_norm", lambda: norms[0]))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Have `owner` use another method for a while."""
    own, missing = vars(owner), object()
    before = own.get(name, missing)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# --- Precision ---------------------------------------------------------------------------------------------------


class _Autocast(nn.Module):
    """Runs steps of a model with 16-bit parameters: inputs stay as they are, and each operation casts what it gets.

    It stands inside the engine, which switches off what autocast it finds around it.
    """

    def __init__(self, step: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.step, self._dtype, self._device_type = step, dtype, device.type
        self._hooks = match_inputs(step) if device.type == "cpu" else []
        # Running statistics have 32 bits, and torch wants the weights beside them to have as many.
        self._running = [part for part in step.modules() if isinstance(part, _NormBase) and part.weight is not None]
        for part in self._running:
            part.__dict__["forward"] = functools.partial(_with_wide_weights, part)

    def stop(self) -> None:
        """Leave the layers as they were."""
        for hook in self._hooks:
            hook.remove()
        for part in self._running:
            part.__dict__.pop("forward", None)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype):
            return self.step(*arguments, **options)


def _with_wide_weights(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    wide = {name: value.float() for name, value in layer.named_parameters(recurse=False)}
    layer.__dict__.update(wide)  # found before the parameters of these names
    try:
        result: torch.Tensor = type(layer).forward(layer, x)
        return result
    finally:
        for name in wide:
            del layer.__dict__[name]


# --- Before and after --------------------------------------------------------------------------------------------


def _forget_models() -> None:
    """Empty what stage 3 remembers of models for as long as the process lives."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    FWD_MODULE_STACK.clear()
    method = vars(Coordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _nothing() -> None:
    pass


def stop_earlier(module: nn.Module) -> None:
    """Stop the engine of an earlier call, or of another run, that still has its hooks on the user's `module`."""
    earlier = module.__dict__.get(_LATEST, lambda: None)()
    if earlier is not None:
        earlier.stop(keep_masters=True)


def the_only(optimizers: list[Any], configured: str | None) -> Any:
    """Return the one optimizer of a run, None if DeepSpeed is to make it.

    Raises:
        ConfigError: there are several.
    """
    if len(optimizers) > 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed steps one",
            expected="one, with a parameter group for each",
        )
    if optimizers and configured is not None:
        raise ConfigError(
            f"there are two optimizers: {type(optimizers[0]).__name__} of configure_optimizers, and {configured}",
            expected="one of the two",
        )
    return optimizers[0] if optimizers else None
