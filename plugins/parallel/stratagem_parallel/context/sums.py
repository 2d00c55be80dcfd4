"""Find losses of a step whose mean over ranks is not the loss of whole sequences.

[Note: sums]
The loss of a step is the mean over the ranks. Sums over the positions of parts would count 1/n of them, and a sum that
is divided by the number of targets of a part is another mean on each rank. So a sum over positions that has a gradient
is refused at the end of the step, unless the step called `context_mean` or `context_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem_parallel.context.mixing import is_flat

if TYPE_CHECKING:
    from stratagem_parallel.context.part import Part


def sum_over_positions(function: Any, args: Sequence[Any], options: Mapping[str, Any], axis: Part) -> str:
    """Return how `function` sums or selects positions of a loss; an empty string if it does not."""
    name, tensor = getattr(function, "__name__", ""), args[0] if args else options.get("input")
    if not isinstance(tensor, Tensor) or axis.length < 2 or not tensor.requires_grad:
        return ""
    if _reduction(name, args, options) == "sum":
        return f'computes {name} with reduction="sum"'
    if not _has_positions(tensor, axis):
        return ""
    if name == "sum":
        given = options.get("dim", options.get("axis", args[1] if len(args) > 1 else None))
        dims = {
            each % tensor.dim()
            for each in (given if isinstance(given, tuple | list) else (given,))
            if type(each) is int
        }
        over = 0 if is_flat(tensor, axis) else axis.dim
        return "computes a sum over the positions of a part" if not dims or over in dims else ""
    mask = args[1] if len(args) > 1 else options.get("mask")
    selects = function is torch.Tensor.__getitem__ or name == "masked_select"
    if selects and isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.dim() == tensor.dim():
        return "selects positions of a part with a mask"
    return ""


def kept_loss(function: Any, args: Sequence[Any], options: Mapping[str, Any], axis: Part) -> str:
    """Return which loss `function` is, if it is called under a reference that the step kept."""
    for loss in axis.losses:
        if function is loss or function is loss.loss:
            target = args[1] if len(args) > 1 else options.get("target")
            is_index = isinstance(target, Tensor) and not target.is_floating_point()
            return loss.__name__ if is_index and _reduction(loss.__name__, args, options) == "mean" else ""
    return ""


def _reduction(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the argument of this name of a loss."""
    if options.get("size_average") is False:
        return "sum"
    place = {"cross_entropy": 6, "nll_loss": 6}.get(name)
    default = "mean" if place is not None else ""
    return str(args[place] if place is not None and len(args) > place else options.get("reduction", default))


def _has_positions(tensor: Tensor, axis: Part) -> bool:
    if is_flat(tensor, axis):
        return True
    shape = tensor.shape
    if len(shape) <= axis.dim or shape[axis.dim] != axis.length:
        return False
    samples = math.prod(shape[: axis.dim])
    return samples > 0 and axis.samples % samples == 0
