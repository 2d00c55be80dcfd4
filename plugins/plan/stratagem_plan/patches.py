"""What a plan replaces in torch: functions that refuse tensors without values, or that it has to follow."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from stratagem_plan.backend import NAME, current_stream, planned_device
from stratagem_plan.counter import StepCounter


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Within, `owner` has `stand_in` under `name`."""
    original = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, original)


def converting_fakes() -> contextlib.AbstractContextManager[None]:
    """Within, conversions of modules replace parameters that are fake, or get so: torch would swap what is in them."""
    original = torch.nn.Module._apply
    #: By those that they replace; both may go, as the whole parameters do of which a strategy keeps parts.
    made = WeakIdKeyDictionary()

    def converted(parameter: torch.nn.Parameter, function: Any) -> torch.nn.Parameter:
        known: torch.nn.Parameter | None = made[parameter]() if parameter in made else None
        if known is not None:  # another module has it, too
            return known
        values = function(parameter.detach())
        if values.dtype is parameter.dtype and values.device == parameter.device:
            return parameter
        new = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(new).update(vars(parameter) | vars(new))  # what the user has set stays
        made[parameter] = weakref.ref(new)
        return new

    def apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        if function is not without_values and not any(isinstance(each, FakeTensor) for each in module.parameters()):
            return original(module, function, recurse)  # type: ignore[no-untyped-call,no-any-return]  # torch's
        for child in module.children() if recurse else ():
            child._apply(function)  # some classes override it
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = converted(parameter, function)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return replaced(torch.nn.Module, "_apply", apply)


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like a real one on the planned device, for `Module._apply`; others as they are."""
    if isinstance(tensor, FakeTensor) and tensor.device.type == NAME:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=planned_device())


@functools.cache
def _fake_kind(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class of fake tensors that are instances of `kind`, too."""
    return type(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})


def subclassing_fakes() -> contextlib.AbstractContextManager[None]:
    """Within, `as_subclass` works for fake tensors: torch refuses to give one another class."""
    original = torch.Tensor.as_subclass

    def as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) or issubclass(FakeTensor, kind):
            return original(tensor, kind)
        with torch._C.DisableTorchFunction():
            made: torch.Tensor = torch.ops.aten.alias(tensor)
        made.__class__ = _fake_kind(kind)
        return made

    return replaced(torch.Tensor, "as_subclass", as_subclass)


def formatting_fakes() -> contextlib.AbstractContextManager[None]:
    """Within, a format such as ``f"{loss:.3f}"`` asks for the value of a fake tensor, as it does of a real one."""
    original = torch.Tensor.__format__

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        asks = isinstance(tensor, FakeTensor) and spec and not tensor.dim()
        return format(tensor.item(), spec) if asks else str(original(tensor, spec))  # type: ignore[no-untyped-call]  # torch's

    return replaced(torch.Tensor, "__format__", formatted)


@contextlib.contextmanager
def without_waits() -> Iterator[None]:
    """Within, FSDP waits on planned streams, and a truncated normal distribution is drawn once, not until it fits."""

    def drawn(tensor: torch.Tensor, mean: float, std: float, *_: Any, **__: Any) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_(mean, std)

    with (
        replaced(torch.accelerator, "current_stream", lambda _device=None: current_stream()),
        replaced(torch.nn.init, "_no_grad_trunc_normal_", drawn),
    ):
        yield


@contextlib.contextmanager
def quiet_shapes(counter: StepCounter) -> Iterator[None]:
    """Within, tensors with which DTensor finds out the shapes of results are not counted."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def silent(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with counter.quiet():
                return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
            stack.enter_context(replaced(ShardingPropagator, name, silent(getattr(ShardingPropagator, name))))
        yield


def counting_resizes(counter: StepCounter) -> contextlib.AbstractContextManager[None]:
    """Within, `counter` counts storages whose size is set: FSDP frees gathered parameters in this way."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        counter.resized(storage)
        return result

    return replaced(torch.UntypedStorage, "resize_", resize)
