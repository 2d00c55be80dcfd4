"""Operations that mix the positions of a part: norms, pools, convolutions, products; and sums that are losses.

Each function returns what an operation does, for an error, or an empty string if it treats each position alone.

[Note: sums]
The loss of a step is the mean over the ranks. Sums over the positions of parts would count 1/n of them, and a sum that
is divided by the number of targets of a part is another mean on each rank. So a sum over positions that has a gradient
is refused at the end of the step, unless the step called `context_mean` or `context_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem_parallel.target_numbers import mean_over_targets, reduction_of

if TYPE_CHECKING:
    from stratagem_parallel.context.part import Part

Arguments = Sequence[Any]
Options = Mapping[str, Any]


def of_operation(name: str, args: Arguments, options: Options, axis: Part) -> str:
    """Return how the function `name` of torch mixes positions of a part."""
    check = _CHECKS.get(name)
    if check is None or axis.length < 2:
        return ""
    tensor = _argument(args, options, 0, "input")
    if name == "einsum" or isinstance(tensor, Tensor):
        return check(name, args, options, axis)
    return ""


def is_flat(tensor: Tensor, axis: Part) -> bool:
    """Return whether the first dimension of `tensor` counts the positions of all samples."""
    return tensor.dim() > 0 and axis.dim > 0 and tensor.shape[0] == axis.samples * axis.length


def dims_of(given: Any, tensor: Tensor) -> set[int]:
    """Return the dimensions of `tensor` that a function was `given`, as a number or as several."""
    each_given = given if isinstance(given, tuple | list) else (given,)
    return {each % tensor.dim() for each in each_given if type(each) is int}


def _argument(args: Arguments, options: Options, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else options.get(name, default)


# --- Norms -----------------------------------------------------------------------------------------------------------


def _norm(name: str, args: Arguments, options: Options, axis: Part) -> str:
    tensor = _argument(args, options, 0, "input")
    if name == "batch_norm" and not _argument(args, options, 5, "training", False):
        return ""
    if name == "instance_norm" and not _argument(args, options, 5, "use_input_stats", True):
        return ""
    over_positions = axis.length in tensor.shape[2:] or (name == "batch_norm" and is_flat(tensor, axis))
    return f"computes the statistics of {name} over positions of each part" if over_positions else ""


def _last_norm(name: str, args: Arguments, options: Options, axis: Part) -> str:
    tensor, shape = args[0], _argument(args, options, 1, "normalized_shape", ())
    first = tensor.dim() - len(tuple(shape))
    mixes = first <= axis.dim < tensor.dim() and tensor.shape[axis.dim] == axis.length and first < tensor.dim() - 1
    return f"computes {name} over positions of each part" if mixes else ""


# --- Convolutions and pools ------------------------------------------------------------------------------------------


def _convolution(name: str, args: Arguments, options: Options, axis: Part) -> str:
    weight = _argument(args, options, 1, "weight")
    stride = _argument(args, options, 3, "stride", 1)
    spatial = int(name[-2])
    return _windows(name, args[0], tuple(weight.shape[-spatial:]), stride, 0, axis)


def _pool(name: str, args: Arguments, options: Options, axis: Part) -> str:
    place = 2 if name.startswith("lp_pool") else 1
    kernel = _argument(args, options, place, "kernel_size")
    stride = _argument(args, options, place + 1, "stride")
    padding = 0 if place == 2 else _argument(args, options, place + 2, "padding", 0)
    return _windows(name, args[0], kernel, kernel if stride is None else stride, padding, axis)


def _windows(name: str, tensor: Tensor, kernels: Any, strides: Any, paddings: Any, axis: Part) -> str:
    """Return whether windows along a dimension of positions reach over the end of a part."""
    spatial = int(name.replace("_with_indices", "")[-2])
    for place in range(spatial):
        if tensor.dim() <= spatial - place or tensor.shape[place - spatial] != axis.length:
            continue
        kernel, stride, padding = (_at(each, place) for each in (kernels, strides, paddings))
        whole = kernel == stride and padding == 0 and ("transpose" in name or axis.length % kernel == 0)
        if kernel > 1 and not whole:
            return f"computes {name} over neighbouring positions"
    return ""


def _resized(name: str, args: Arguments, options: Options, axis: Part) -> str:
    tensor = _argument(args, options, 0, "input")
    return f"computes {name} over positions of each part" if axis.length in tensor.shape[2:] else ""


def _at(value: Any, place: int) -> Any:
    several = value if isinstance(value, tuple | list) else (value,)
    return several[place % len(several)] if several else 1


# --- Products --------------------------------------------------------------------------------------------------------


def _product(name: str, args: Arguments, options: Options, axis: Part) -> str:
    first, second = (args[1], args[2]) if name == "baddbmm" else (args[0], _argument(args, options, 1, "other"))
    if second is None:
        second = options.get("mat2")
    if name == "__rmatmul__":
        first, second = second, first
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or second.dim() < 3:
        return ""  # a matrix for each position
    sums = first.shape[-1] == second.shape[-2] == axis.length
    kept = first.dim() > 2 and first.shape[axis.dim] == axis.length and axis.dim < first.dim() - 1
    alone = kept and second.shape[axis.dim] == axis.length and axis.dim < second.dim() - 2
    return "sums over positions of each part in a product" if sums and not alone else ""


def _einsum(_: str, args: Arguments, options: Options, axis: Part) -> str:
    equation = args[0] if args else options.get("equation")
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(equation, str) or "." in equation:
        return ""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        right = "".join(letter for letter in left if left.count(letter) == 1)
    for letters, operand in zip(left.split(","), operands, strict=False):
        if not isinstance(operand, Tensor) or isinstance(operand, nn.Parameter) or operand.dim() < 2:
            continue
        places = [place for place, size in enumerate(operand.shape) if size == axis.length]
        place = axis.dim if axis.dim in places else next(iter(places), None)
        if place is not None and letters[place] not in right:
            return f"sums over positions of each part in einsum({equation!r})"
    return ""


_CHECKS: dict[str, Callable[[str, Arguments, Options, Part], str]] = {
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm"), _norm),
    **dict.fromkeys(("layer_norm", "rms_norm"), _last_norm),
    **{f"conv{transposed}{spatial}d": _convolution for transposed in ("", "_transpose") for spatial in (1, 2, 3)},
    **{f"{kind}_pool{spatial}d": _pool for kind in ("avg", "max", "lp") for spatial in (1, 2, 3)},
    **{f"max_pool{spatial}d_with_indices": _pool for spatial in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{spatial}d": _resized for kind in ("avg", "max") for spatial in (1, 2, 3)},
    **{f"adaptive_max_pool{spatial}d_with_indices": _resized for spatial in (1, 2, 3)},
    "interpolate": _resized,
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"), _product),
    "einsum": _einsum,
}


# --- Losses whose mean over ranks is not that of whole sequences -----------------------------------------------------


def sum_over_positions(function: Any, args: Arguments, options: Options, axis: Part) -> str:
    """Return how `function` sums or selects positions of a loss; an empty string if it does not."""
    name, tensor = getattr(function, "__name__", ""), args[0] if args else options.get("input")
    if not isinstance(tensor, Tensor) or axis.length < 2 or not tensor.requires_grad:
        return ""
    loss = getattr(function, "loss", function)  # that of a `MeanOverAllTargets`
    if reduction_of(loss, args, dict(options)) == "sum":
        return f'computes {name} with reduction="sum"'
    if not _has_positions(tensor, axis):
        return ""
    if name == "sum":
        given = options.get("dim", options.get("axis", args[1] if len(args) > 1 else None))
        dims = dims_of(given, tensor)
        over = 0 if is_flat(tensor, axis) else axis.dim
        return "computes a sum over the positions of a part" if not dims or over in dims else ""
    mask = args[1] if len(args) > 1 else options.get("mask")
    selects = function is torch.Tensor.__getitem__ or name == "masked_select"
    if selects and isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.dim() == tensor.dim():
        return "selects positions of a part with a mask"
    return ""


def kept_loss(function: Any, args: Arguments, options: Options, axis: Part) -> str:
    """Return which loss `function` is, if it is called under a reference that the step kept."""
    kept = next((each for each in axis.losses if function is each or function is each.loss), None)
    return kept.__name__ if kept is not None and mean_over_targets(kept.loss, args, dict(options)) is not None else ""


def _has_positions(tensor: Tensor, axis: Part) -> bool:
    if is_flat(tensor, axis):
        return True
    shape = tensor.shape
    if len(shape) <= axis.dim or shape[axis.dim] != axis.length:
        return False
    samples = math.prod(shape[: axis.dim])
    return samples > 0 and axis.samples % samples == 0
