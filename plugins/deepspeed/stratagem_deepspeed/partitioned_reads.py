"""Let hooks read shapes of parameters that stage 3 has partitioned, and refuse what needs values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stratagem.errors import ConfigError

_PROPERTIES: Final = vars(torch._C.TensorBase)
_SHAPES: Final = {
    Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.size, Tensor.__len__, Tensor.element_size,
    Tensor.stride, Tensor.is_contiguous, *(_PROPERTIES[name].__get__ for name in ("shape", "ndim", "nbytes")),
}  # fmt: skip
#: Properties that are values.
_VALUES: Final = {_PROPERTIES[name].__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_HARMLESS: Final = {
    "__get__", "__set__", "__hash__", "__repr__", "is_complex", "is_floating_point", "register_hook",
    "register_post_accumulate_grad_hook", "get_device",
}  # fmt: skip


class PartitionedReads(TorchFunctionMode):
    """Within, a program that asks a partitioned parameter for its shape gets the whole one.

    DeepSpeed has replaced the parameter by an empty tensor, whose norm is 0.

    Raises:
        ConfigError: the program computes with such a parameter.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it needs values that no rank has."""
        options, name = kwargs or {}, getattr(func, "__name__", "")
        found: Any = next(_partitioned((*args, *options.values())), None)
        if found is None or not _is_asked_by_program(name):
            return func(*args, **options)
        if func in _SHAPES:
            return func(torch.empty(found.ds_shape, dtype=found.dtype, device="meta"), *args[1:], **options)
        is_in_place = name.endswith("_") and not name.endswith("__") and args[:1] and args[0] is found
        if is_in_place or (name in _HARMLESS and func not in _VALUES):  # `ManualWrites` finds what is written
            return func(*args, **options)
        raise ConfigError(
            f"a hook computes with a parameter of shape {list(found.ds_shape)} that stage 3 has partitioned over the "
            "ranks",
            expected="gathered parameters",
            do="compute inside deepspeed.zero.GatheredParameters(parameters), on all ranks",
        )


def _partitioned(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from _partitioned(each)
        elif isinstance(each, nn.Parameter) and each.numel() == 0 < getattr(each, "ds_numel", 0):
            yield each


def _is_asked_by_program(name: str) -> bool:
    """Whether the call comes from the user's program. Plugins and DeepSpeed know what they read; `state_dict` warns."""
    frame: Any = sys._getframe(2)
    if name == "detach" and frame.f_globals["__name__"] == nn.modules.module.__name__:
        return False
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "torch":
        frame = frame.f_back
    package: str = frame.f_globals["__name__"].partition(".")[0]
    return package != "deepspeed" and not package.startswith("stratagem")
