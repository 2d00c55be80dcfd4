"""Cross-entropy of logits whose classes are cut: each rank holds some of them, and no rank gathers all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem_parallel_unchanged.tensor.moves import Line


class _NegativeLogLikelihood(torch.autograd.Function):
    """Of each target, from this rank's logits (N, own classes); as Megatron-LM computes it, Shoeybi et al. 2019."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, offset: int, line: Line) -> Tensor:
        exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        lowest = torch.finfo(exact.dtype).min
        own_max = exact.amax(1) if exact.shape[1] else exact.new_full((exact.shape[0],), lowest)
        shifted = exact - line.max(own_max).unsqueeze(1)
        index = target - offset
        is_here = (index >= 0) & (index < exact.shape[1])
        index = torch.where(is_here, index, 0)
        row = torch.arange(len(target), device=target.device)
        found = shifted[row, index] if exact.shape[1] else shifted.new_zeros(len(target))
        exponentials = shifted.exp_()
        both = torch.stack([exponentials.sum(1), torch.where(is_here, found, 0)])
        total, chosen = line.sum(both)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), index, is_here)
        ctx.dtype = logits.dtype
        out: Tensor = total.log() - chosen
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        softmax, index, is_here = ctx.saved_tensors
        out = softmax * gradient.unsqueeze(1)
        if out.shape[1]:
            row = torch.arange(len(index), device=index.device)
            out[row, index] -= torch.where(is_here, gradient, 0)
        return out.to(ctx.dtype), None, None, None


def _check_in_range(target: Tensor, out_of_range: Tensor) -> None:
    """Fail as ``F.cross_entropy`` does: on a GPU, and in compiled code, by an assertion that is part of the graph."""
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(out_of_range.logical_not().all(), "cross_entropy: a target is out of bounds")
    elif bool(out_of_range.any()):
        raise IndexError(f"Target {int(target[out_of_range][0])} is out of bounds.")


def cross_entropy(
    logits: Tensor, target: Tensor, classes_dim: int, num_classes: int, line: Line, ignore_index: int, reduction: str
) -> Tensor:
    """Return ``F.cross_entropy`` of the whole logits and `target`, replicated. Collective.

    Args:
        logits: this rank's part of the logits along `classes_dim`.
        target: indices of classes, replicated.
    """
    offset, own = line.bounds(num_classes)
    flat = logits.movedim(classes_dim, -1).reshape(-1, own)
    wanted = target.reshape(-1)
    is_counted = wanted != ignore_index
    _check_in_range(wanted, is_counted & ((wanted < 0) | (wanted >= num_classes)))
    target_or_none = torch.where(is_counted, wanted, -1)
    each: Tensor = _NegativeLogLikelihood.apply(flat, target_or_none, offset, line)  # type: ignore[no-untyped-call]
    each = torch.where(is_counted, each, 0)
    if not torch.is_autocast_enabled(logits.device.type):
        each = each.to(logits.dtype)
    if reduction == "none":
        return each.view(target.shape)
    return each.sum() if reduction == "sum" else each.sum() / is_counted.sum()
