"""Values that are logged: one number each, and how several become one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeAlias

    from torch import Tensor

    #: How the values of an epoch become one; a callable gets them stacked, (n,) float64.
    ReduceFx: TypeAlias = Literal["mean", "sum", "max", "min"] | Callable[[Tensor], Tensor]


# --- Numbers: see [Note: exact numbers] -----------------------------------------------------------------------------

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)


def number(name: str, value: Any) -> Tensor | int | float:
    """Return what is logged of `value`: an int, a float, or a tensor without dimensions of int64, float32 or float64.

    Raises:
        ConfigError: `value` is not one real number.
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach() if value.requires_grad else value
        if type(tensor) is not torch.Tensor and callable(whole := getattr(tensor, "full_tensor", None)):
            tensor = whole()  # of a DTensor each rank has a part
        if tensor.is_meta:
            raise ConfigError(
                f"log({name!r}) got a tensor without a value, on the meta device", expected="a tensor of this rank",
                do="under a pipeline, log values of the parameters of other stages on the ranks that hold them",
            )  # fmt: skip
        if tensor.numel() != 1:
            raise ConfigError(f"log({name!r}) got a tensor of shape {tuple(tensor.shape)}", expected="one number")
        if tensor.dim():
            tensor = tensor.reshape(())
        if tensor.dtype is torch.float32 or tensor.dtype is torch.float64 or tensor.dtype is torch.int64:
            return tensor
        if tensor.dtype in _WHOLE:
            return tensor.long()
        if tensor.dtype is torch.uint64:
            return _within_64_bits(int(tensor.view(torch.int64)) % 2**64)
        if not tensor.is_floating_point():
            raise ConfigError(
                f"log({name!r}) got a tensor of {str(tensor.dtype).removeprefix('torch.')}", expected="a real number",
                do="log its real part, its imaginary part or its absolute value",
            )  # fmt: skip
        return tensor.float()
    if isinstance(value, int):
        return _within_64_bits(int(value))
    if isinstance(value, float):
        return value
    if isinstance(shape := getattr(value, "shape", None), tuple) and callable(item := getattr(value, "item", None)):
        if math.prod(shape) != 1:
            raise ConfigError(f"log({name!r}) got an array of shape {shape}", expected="one number")
        if isinstance(plain := item(), int | float):
            return number(name, plain)
    raise ConfigError(
        f"log({name!r}) got {value!r}",
        expected="a number, a tensor with one element, or an object with update, compute and reset",
    )


def combine(total: Any, value: Any, reduction: str) -> Any:
    """Return the "sum", "max" or "min" of `total` (None at first) and `value`, both as `number` returns them."""
    if total is None:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    if not isinstance(total, torch.Tensor) and not isinstance(value, torch.Tensor):
        if reduction == "sum":
            return total + value
        if value != value or total != total:  # NaN
            return math.nan
        return max(total, value) if reduction == "max" else min(total, value)
    total, value = as_tensor(total), as_tensor(value)
    if total.dtype is not value.dtype and total.dtype is not torch.float64:
        total = total.double()
    if reduction == "sum":
        return total + value
    return torch.maximum(total, value) if reduction == "max" else torch.minimum(total, value)


def as_tensor(value: Any) -> Tensor:
    if isinstance(value, torch.Tensor):
        return value
    value = _within_64_bits(value) if isinstance(value, int) else float(value)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def infer_batch_size(batch: Any) -> int:
    """Return the first dimension of the first tensor found in `batch`; 1 if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # its data has a row for each time step
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    for item in items:
        if isinstance(item, torch.Tensor | list | tuple | dict):
            return infer_batch_size(item)
    return 1


def _within_64_bits(value: int) -> int | float:
    return value if -(2**63) <= value < 2**63 else float(value)
