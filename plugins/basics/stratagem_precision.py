"""True and mixed precision with torch's own tools: dtype conversion, autocast, and loss scaling for fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from stratagem.api import LOSS_SCALING, SIXTEEN_BIT_GRADIENTS, Capabilities, Precision, PrecisionPolicy, hookimpl
from stratagem.api.batches import map_batch
from stratagem.api.validators import at_least, between, more_than
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

_TRUE = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}
#: Attribute of a module: the precision of an earlier run that changed its dtypes, and the dtype.
_CONVERTED_BY = "_dtypes_converted_by"


# --- True: everything in one dtype -------------------------------------------------------------------------------


@define(eq=False, kw_only=True)
class FullPrecision(Precision):
    """Leave all dtypes as the model has them, usually fp32; no hook runs in a step."""

    @hookimpl
    def prepare_module(self, module: nn.Module) -> None:
        _check_not_converted(module, "32-true")


@define(eq=False, kw_only=True)
class TruePrecision(Precision):
    """Use one dtype for parameters, inputs and outputs."""

    #: 16-bit dtypes are faster and smaller, but lose updates smaller than the rounding step of the parameter.
    dtype: Literal["16", "bf16", "64"] = "bf16"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # the option decides
        return Capabilities(provides=() if self.dtype == "64" else {SIXTEEN_BIT_GRADIENTS})

    def policy(self) -> PrecisionPolicy:
        dtype = _TRUE[self.dtype]
        return PrecisionPolicy(param_dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    @hookimpl
    def init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(_TRUE[self.dtype])

    @hookimpl
    def prepare_module(self, module: nn.Module) -> None:
        dtype = _TRUE[self.dtype]
        if any(each.is_floating_point() and each.dtype != dtype for each in module.parameters()):
            module.__dict__[_CONVERTED_BY] = (f"{self.dtype}-true", dtype)
        # Not `Module.to`, which would convert complex parameters to real ones.
        {"16": module.half, "bf16": module.bfloat16, "64": module.double}[self.dtype]()

    @hookimpl
    def step_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(_TRUE[self.dtype])

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        return _cast((yield), _TRUE[self.dtype])


def half() -> TruePrecision:
    """Return the precision ``16-true``."""
    return TruePrecision(dtype="16")


def bfloat16() -> TruePrecision:
    """Return the precision ``bf16-true``."""
    return TruePrecision(dtype="bf16")


def double() -> TruePrecision:
    """Return the precision ``64-true``."""
    return TruePrecision(dtype="64")


def _check_not_converted(module: nn.Module, precision: str) -> None:
    """Refuse a module whose dtypes a precision of an earlier run has changed, unless they were changed back."""
    name, dtype = module.__dict__.get(_CONVERTED_BY, ("", None))
    if dtype is not None and any(parameter.dtype == dtype for parameter in module.parameters()):
        raise ConfigError(
            f"precision {name!r} of an earlier run converted this {type(module).__name__} to {dtype}, and precision is "
            f"{precision!r}",
            expected=f"precision={name!r}, or a module in fp32",
            do="call model.float() first: it does not bring back the bits that were rounded away",
        )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return `batch` with its floating-point tensors in `dtype`."""

    def cast(leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        return leaf.to(dtype) if isinstance(data, torch.Tensor) and data.is_floating_point() else leaf

    return map_batch(batch, cast)


# --- Mixed: fp32 parameters, 16-bit compute ----------------------------------------------------------------------


@define(eq=False, kw_only=True)
class _Autocast(Precision):
    """Keep fp32 parameters and compute in 16 bits where that is safe (torch.autocast)."""

    _compute_dtype: ClassVar[torch.dtype]

    #: Cache 16-bit copies of parameters within a forward: costs their memory, saves a cast at each use.
    cache_enabled: bool = True

    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy(compute_dtype=self._compute_dtype)

    @hookimpl
    def step_context(self, run: RunContext) -> AbstractContextManager[Any]:
        # With manual optimization a step may come between two forwards of one context: a cached copy would be stale.
        cache = self.cache_enabled and not run.manual
        return torch.autocast(run.device.type, self._compute_dtype, cache_enabled=cache)

    @hookimpl(wrapper=True)
    def backward(self, run: RunContext) -> Generator[None, bool, bool]:
        # The graph keeps the 16-bit copies of parameters that backward needs, and releases them one after the other.
        torch.clear_autocast_cache()
        # Backward already runs in the dtypes of forward; autocast around it would cast some operations twice.
        with torch.autocast(run.device.type, enabled=False):
            return (yield)


@define(eq=False, kw_only=True)
class MixedPrecision(_Autocast):
    """Keep fp32 parameters and compute in bf16 where that is safe (torch.autocast)."""

    _compute_dtype = torch.bfloat16

    @hookimpl
    def prepare_module(self, module: nn.Module) -> None:
        _check_not_converted(module, "bf16-mixed")


@define(eq=False, kw_only=True)
class ScaledPrecision(_Autocast):
    """Keep fp32 parameters and compute in fp16; scale the loss so that small gradients do not underflow.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018. If gradients overflow on one rank, all ranks skip the
    step, and the scale is reduced; of several optimizers none steps. Where they are stepped by hand the scale changes
    only between batches, so that all losses of a batch have the same scale.
    """

    #: Initial loss scale: too large costs a few skipped steps, too small loses small gradients at first.
    init_scale: float = field(default=65536.0, validator=more_than(0))
    #: Factor for the scale after `growth_interval` steps without overflow.
    growth_factor: float = field(default=2.0, validator=more_than(1))
    #: Factor for the scale after an overflow.
    backoff_factor: float = field(default=0.5, validator=between(0.0001, 0.9999))
    #: Steps without overflow before the scale is increased.
    growth_interval: int = field(default=2000, validator=at_least(1))

    _compute_dtype = torch.float16
    capabilities = Capabilities(provides={LOSS_SCALING})

    scaler: GradScaler | None = field(init=False, default=None)
    _loaded: dict[str, Any] | None = field(init=False, default=None)
    #: Overflows since the last update: one flag for each device.
    _found: dict[torch.device, torch.Tensor] = field(init=False, factory=dict)
    #: Optimizers whose gradients were unscaled for clipping and that have not stepped yet, with `_num_losses` then.
    _clipped: dict[int, tuple[Optimizer, int]] = field(init=False, factory=dict)
    _num_losses: int = field(init=False, default=0)

    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy(compute_dtype=torch.float16, loss_scaling=True)

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        _check_not_converted(module, "16-mixed")
        if run.stage == "train":
            _check_parameters(module)
        for number in list(self._clipped):  # an earlier fit ended between clipping and stepping
            self._reset(number)
        if self.scaler is None:
            self.scaler = self._new_scaler(run.device.type)
            if self._loaded is not None:
                self.scaler.load_state_dict(self._loaded)

    def _new_scaler(self, device_type: str) -> GradScaler:
        return _Scaler(device_type, self.init_scale, self.growth_factor, self.backoff_factor, self.growth_interval)

    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        for number, (optimizer, _) in list(self._clipped.items()):
            if not any(gradient.any() for gradient in _gradients(optimizer)):
                self._reset(number)  # clipped, then dropped instead of stepped
        self._num_losses += 1
        assert self.scaler is not None, "prepare_module creates it"
        return self.scaler.scale(loss)

    @hookimpl(wrapper=True)
    def clip_gradients(self, optimizer: Optimizer) -> Generator[None, torch.Tensor | float, torch.Tensor | float]:
        _, num_losses = self._clipped.setdefault(id(optimizer), (optimizer, self._num_losses))
        if num_losses != self._num_losses:
            raise ConfigError(
                f"the gradients of {type(optimizer).__name__} were clipped, then another backward ran, and they are "
                "clipped again under precision '16-mixed'",
                expected="all backward calls of a step before its clipping",
                do="step or zero_grad before the next backward",
            )
        self._unscale(optimizer)
        return (yield)

    @hookimpl
    def step_optimizers(
        self, optimizers: list[Optimizer], closure: Callable[[], torch.Tensor] | None, run: RunContext
    ) -> bool:
        if closure is not None:
            raise ConfigError(
                f"precision '16-mixed' cannot step {type(optimizers[0]).__name__}, which needs a closure",
                expected="an optimizer without a closure",
                do='use precision="bf16-mixed" or "32-true"',
            )
        found = [self._unscale(each) for each in optimizers]
        with_gradients = [each for each, flags in zip(optimizers, found, strict=True) if flags]
        if run.collectives.world_size > 1:
            self._all_reduce_overflow(found, run)
        # The only device synchronization of a step, before more work is queued on the device.
        # GradScaler.step would synchronize once more.
        overflowed = not run.environment.simulated and _any(found)  # a plan has no values
        for optimizer in () if overflowed else with_gradients:
            run.step.step_one(optimizer)
        for optimizer in optimizers:
            self._record(optimizer)
        if len(optimizers) == max(1, len(run.optimizers)):
            self._update()
        return not overflowed

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        self._update()
        return (yield)

    def _unscale(self, optimizer: Optimizer) -> dict[torch.device, torch.Tensor]:
        """Divide the gradients by the scale unless that is done; return the overflow flags, one for each device.

        Without gradients there are no flags: a step without a loss changes nothing.
        """
        assert self.scaler is not None, "prepare_module creates it"
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY and next(_gradients(optimizer), None) is not None:
            if not self._num_losses:
                raise ConfigError(
                    "gradients came from a loss that precision '16-mixed' did not scale",
                    expected="manual_backward(loss) or run.backward(loss)",
                    do="call it instead of loss.backward()",
                )
            self.scaler.unscale_(optimizer)
        found: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
        return found

    def _all_reduce_overflow(self, found: list[dict[torch.device, torch.Tensor]], run: RunContext) -> None:
        """All-reduce the overflow flags (max): one collective, which ranks without gradients call too."""
        flag = torch.zeros((), device=run.device)
        for local in (each for flags in found for each in flags.values()):
            flag = torch.maximum(flag, local.to(run.device))
        flag = run.collectives.unchecked.all_reduce(flag, "max")
        if not any(found):
            assert self.scaler is not None, "prepare_module creates it"
            self.scaler.scale(flag)  # creates the scale if this rank had no loss yet: it must change here too
        for flags in found:
            for device in list(flags) or [run.device]:
                flags[device] = flag.to(device)

    def _record(self, optimizer: Optimizer) -> None:
        """Add this optimizer's overflow flags to those of the next update, and allow it another step before that."""
        assert self.scaler is not None, "prepare_module creates it"
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device, flag in found.items():
            self._found[device] = torch.maximum(self._found[device], flag) if device in self._found else flag
        self._reset(id(optimizer))

    def _reset(self, number: int) -> None:
        """Treat the next gradients of this optimizer as scaled."""
        self._clipped.pop(number, None)
        assert self.scaler is not None, "prepare_module creates it"
        self.scaler._per_optimizer_states.pop(number, None)

    def _update(self) -> None:
        """Update the scale from the overflow flags since the last update, if any optimizer stepped."""
        if self._found:
            assert self.scaler is not None, "prepare_module creates it"
            self.scaler._per_optimizer_states["found"] = {  # type: ignore[index]  # not the id of an optimizer
                "stage": OptState.STEPPED,
                "found_inf_per_device": self._found,
            }
            self.scaler.update()
            self._found = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of steps without overflow."""
        if self.scaler is None:
            return {}
        self._update()  # the flags of the last batch determine the scale of the next one
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved scale; may be called before the scaler exists."""
        self._loaded, self._found = state or None, {}
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
        elif self.scaler is not None:
            self.scaler = self._new_scaler(self.scaler._device)


class _Scaler(GradScaler):
    """Unscales gradients of each class and device separately.

    No operation accepts DTensors and plain tensors. Gradients on the CPU need the scale there before they are read:
    torch's scaler starts that copy and does not wait for the GPU.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parts: dict[tuple[type, torch.device], list[torch.Tensor]] = {}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parts.setdefault((type(parameter.grad), parameter.grad.device), []).append(parameter)
        found: dict[torch.device, torch.Tensor] = {}
        for (_, device), parameters in parts.items():
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            flag = found_inf.to(device, copy=True)
            (flag,) = super()._unscale_grads_(part, inv_scale.to(device), flag, allow_fp16).values()
            found[device] = torch.maximum(found[device], flag) if device in found else flag
        return found


def _any(found: list[dict[torch.device, torch.Tensor]]) -> bool:
    """Return whether a flag in `found` is set, with one synchronization."""
    flags = [flag for each in found for flag in each.values()]
    if len(flags) > 1:
        flags = [torch.stack([flag.to(flags[0].device) for flag in flags]).amax()]
    return bool(flags[0]) if flags else False


def _gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _check_parameters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise ConfigError(
                f"parameter {name} is float16 under precision '16-mixed'",
                expected="float32, so that small updates are not lost",
                do='convert the model with .float(), or use precision="16-true"',
            )
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')} under precision '16-mixed'",
                expected="real parameters: torch's GradScaler does not support complex gradients",
                do='use precision="bf16-mixed" or "32-true"',
            )
