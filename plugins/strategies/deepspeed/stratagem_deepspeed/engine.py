"""DeepSpeed's engine as a module to call, and how a model and an optimizer become one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_deepspeed.state import masters, put_masters

_AS_IT_IS = contextlib.nullcontext()
#: Where a module remembers what wrapped it last.
_LATEST = "_stratagem_engine"
#: Where it keeps the masters of its 16-bit parameters from one engine to the next.
_MASTERS = "_stratagem_masters"
#: Optimizers for which a layer is more than its numbers.
_WHOLE_LAYERS = {"adafactor", "muon", "shampoo", "soap", "lars", "lamb", "novograd"}
#: Layers that on a CPU want what they normalize in the dtype of their weights.
_NORMALIZING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class EngineModule(nn.Module):
    """What a run calls: the user's steps inside DeepSpeed's engine, or by themselves as long as there is none."""

    def __init__(self, step: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self.step = _Autocast(step, dtype, device) if dtype is not None else step
        # Not as submodules and not twice: the engine holds this model's steps itself.
        self.__dict__["engine"] = None
        self.__dict__["user"], self.__dict__["dtype"] = step.module, dtype
        self.__dict__["dtypes"] = [(parameter, parameter.dtype) for parameter in step.parameters()]
        step.module.__dict__[_LATEST] = weakref.ref(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        engine = self.engine
        if engine is not None:
            with self._sparing():
                return engine(*arguments, **options)
        self._check_whole()
        return self.step(*arguments, **options)

    def _check_whole(self) -> None:
        if any(hasattr(parameter, "ds_id") for parameter in self.step.parameters()):
            raise ConfigError(
                "the model is shared out over the processes, and no engine gathers it: another run took it over, or "
                "this one got no optimizer",
                expected="a fit, or an evaluation, of the run that uses it",
            )

    def start(self, deepspeed: Any, config: dict[str, Any], optimizer: Any, run: Any) -> None:
        """Make the engine; without an optimizer it only gathers what a forward needs."""
        trained = [parameter for parameter in self.step.parameters() if parameter.requires_grad]
        accelerator = deepspeed.accelerator.get_accelerator()
        if accelerator.device_name() == "cpu":
            accelerator.is_fp16_supported = lambda: True  # torch can, if the processor cannot
        # All ranks have the same parameters already, and it stumbles over those without dimensions.
        with _replaced(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda _: None):
            self.__dict__["engine"], *_ = deepspeed.initialize(
                model=self.step, optimizer=optimizer, model_parameters=trained, config=config
            )
        self._clip(config["gradient_clipping"])
        if self._keeps_masters() and (kept := self.user.__dict__.pop(_MASTERS, None)):
            put_masters(kept, self.engine.optimizer, self.dtype)
        zero = config["zero_optimization"]
        self.__dict__["spares_weights"] = zero["stage"] == 3 and zero.get("memory_efficient_linear", True)
        if run.world_size > 1 and zero["stage"] in (1, 2) and optimizer is not None:
            self.__dict__["arrivals"] = Arrivals(trained, run)
            if zero["stage"] == 2:
                self._check_each_backward()

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate `loss`; what is computed again is computed as it was."""
        with self._sparing():
            self.engine.backward(loss)

    def _check_each_backward(self) -> None:
        """Stage 2 sends what backward has left as soon as it is over: compare before."""
        finish = self.engine._backward_epilogue

        def compare_and_finish() -> None:
            self.arrivals.compare(ordered=True)
            finish()

        self.engine.__dict__["_backward_epilogue"] = compare_and_finish

    def _compare_arrivals(self) -> None:
        arrivals = self.__dict__.get("arrivals")
        if arrivals is not None and not self.engine.zero_optimization_partition_gradients():
            arrivals.compare(ordered=False)  # stage 1 sends once in a window

    def _sparing(self) -> contextlib.AbstractContextManager[None]:
        """Have linear layers not save their weights for backward, which would keep every gathered one."""
        if not self.__dict__.get("spares_weights"):
            return _AS_IT_IS
        from deepspeed.runtime.zero.linear import zero3_linear_wrap

        return _replaced(nn.functional, "linear", zero3_linear_wrap)

    def clip(self, max_norm: float) -> Any:
        """Have the next step clip; return the norm before clipping.

        The engine averages, measures and clips when it steps. Here it averages and measures before, and not again.
        """
        engine = self.engine
        if "_norms" not in self.__dict__:  # it may have been asked before, to measure alone
            self._finish_window()
            self.__dict__["_norms"] = _norms(engine)
        self._clip(max_norm)
        return _combined(self._norms) / getattr(engine.optimizer, "loss_scale", 1.0)

    def _finish_window(self) -> None:
        """Average what the batches of this window have left."""
        engine = self.engine
        self._compare_arrivals()
        engine._running_engine_step = True  # the end of a window, which is when gradients are averaged
        if not engine.zero_optimization_partition_gradients():
            engine.allreduce_gradients()
        else:
            engine.optimizer.finalize_gradient_accumulation_boundary()

    def step_optimizer(self) -> bool:
        """Step; return whether parameters changed."""
        engine, norms = self.engine, self.__dict__.pop("_norms", None)
        if norms is None:
            self._compare_arrivals()
            engine.step()
        else:
            with _as_it_is(engine, norms):
                engine.step()
            self._clip(engine.config["gradient_clipping"])
        _forget_gradients(engine.optimizer)
        return bool(engine.was_step_applied())

    def _clip(self, max_norm: float) -> None:
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def _keeps_masters(self) -> bool:
        return self.dtype is not None and hasattr(getattr(self.engine, "optimizer", None), "optimizer")

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
        if keep_masters and self._keeps_masters():
            self.user.__dict__[_MASTERS] = masters(self.engine.optimizer)
        engine, self.__dict__["engine"] = self.engine, None
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
        if "arrivals" in self.__dict__:
            self.__dict__.pop("arrivals").stop()
        if isinstance(self.step, _Autocast):
            self.step.stop()


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

    def __init__(self, parameters: list[nn.Parameter], run: Any) -> None:
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
        extremes = self._run.collectives.all_reduce(torch.tensor([mine, -mine]), "max").tolist()
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
    each = torch.stack([torch.as_tensor(norm, dtype=torch.float32).cpu() for norm in norms])
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
        normalizing = [part for part in step.modules() if isinstance(part, _NORMALIZING) and part.weight is not None]
        self._hooks = [part.register_forward_pre_hook(_cast_to_weight) for part in normalizing if device.type == "cpu"]

    def stop(self) -> None:
        """Leave the layers as they were."""
        for hook in self._hooks:
            hook.remove()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype):
            return self.step(*arguments, **options)


def _cast_to_weight(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = arguments
    return (x.to(layer.weight.dtype), *rest)


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
        ConfigError: there are several, or none at all.
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
