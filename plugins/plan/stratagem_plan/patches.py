"""What a plan replaces in torch: functions that refuse tensors without values, or that it has to follow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

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
    """Within, conversions of modules replace fake parameters: torch would swap what is in them, which these refuse."""
    original = torch.nn.Module._apply
    made: Any = WeakIdKeyDictionary()  # the parameters of other stages of a pipeline are let go

    def converted(parameter: torch.nn.Parameter, function: Any) -> Any:
        if parameter not in made:
            values = function(parameter.detach())
            if values.dtype is parameter.dtype and values.device == parameter.device:
                return parameter
            made[parameter] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        return made[parameter]

    def apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        if not any(isinstance(each, FakeTensor) for each in module.parameters()):
            return original(module, function, recurse)  # type: ignore[no-untyped-call,no-any-return]  # torch's
        for child in module.children() if recurse else ():
            apply(child, function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = converted(parameter, function)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return replaced(torch.nn.Module, "_apply", apply)


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
