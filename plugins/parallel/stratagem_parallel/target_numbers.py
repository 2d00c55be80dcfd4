"""Means over a number of targets that parts of a batch may have differently: which they are, and their divisors.

[Note: divisors]
The loss of a step is the mean over parts: ranks of `context`, micro-batches of `pipeline`. That is the mean over all
targets only if each part has as many; so the sum over a part is divided by the mean number of targets of one. Losses
of torch that count targets are known here for both axes. Others can only be compared: see [Note: the comparison] in
`parts`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F  # noqa: N812

#: Losses whose mean is divided by a number of targets or by weights, with the names of their arguments.
LOSSES: dict[Callable[..., Tensor], tuple[str, ...]] = {
    loss: tuple(inspect.signature(loss).parameters)
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy", "mse_loss", "l1_loss")
    if (loss := getattr(F, name, None)) is not None
}
_ELEMENTWISE = (F.mse_loss, F.l1_loss)
#: Other functions whose result is a mean over all that they are given, besides those of which the name ends in "_loss".
_MEANS = {"mean", "cross_entropy", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
_QUOTIENTS = {"div", "divide", "true_divide", "__truediv__", "div_", "__itruediv__"}
#: Those that run, the last innermost.
_changes: list[Callable[[Tensor], Tensor]] = []


def reduction_of(function: Any, args: Sequence[Any], options: dict[str, Any]) -> str:
    """Return what a loss does with the losses of all targets: "mean", "sum" or "none"; "" if it is not known."""
    names = LOSSES.get(function, ())
    given = dict(zip(names, args, strict=False)) | options
    if given.get("size_average") is None and given.get("reduce") is None:
        return str(given.get("reduction", "mean" if names else ""))
    return _reduction.legacy_get_string(given.get("size_average"), given.get("reduce"), emit_warning=False)


def mean_over_targets(
    loss: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> tuple[Tensor, Callable[[], Tensor]] | None:
    """Return the divisor of a call of one of `LOSSES`, and what computes its sum.

    None if the call returns no mean, or one over as many numbers as it is given.
    """
    if reduction_of(loss, args, options) != "mean":
        return None
    given = dict(zip(LOSSES[loss], args, strict=False)) | options
    given = {name: value for name, value in given.items() if name not in ("size_average", "reduce", "reduction")}
    weight, target = given.get("weight"), given["target"]
    if loss in _ELEMENTWISE:
        if weight is None or weight.shape != given["input"].shape:
            return None
        del given["weight"]
        return weight.sum(), lambda: (loss(**given, reduction="none") * weight).sum()
    if target.is_floating_point():
        return None
    ignored = given.get("ignore_index")
    number = number_of(target, weight, -100 if ignored is None else ignored)
    return number, lambda: loss(**given, reduction="sum")


def number_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number of class targets that are not ignored, or the sum of their weights."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight[target.where(counts, 0)], 0).sum()


def divisor_of(function: Any, args: Sequence[Any], options: dict[str, Any], result: Any) -> Tensor | float | None:
    """Return by what `function` divided a sum to get `result`, if it is a mean or a quotient of numbers; else None.

    A mean over a number that differs between parts of a batch is not the mean of the means of parts.
    """
    if getattr(function, "__name__", "") in _QUOTIENTS:
        total, divisor = (*args, *options.values())[:2]
        of_numbers = isinstance(total, Tensor) and total.dim() == 0 and result.dim() == 0
        is_constant = not isinstance(divisor, Tensor) or not divisor.requires_grad
        return divisor if of_numbers and is_constant else None
    return elements_of_mean(function, args, options, result)


def elements_of_mean(function: Any, args: Sequence[Any], options: dict[str, Any], result: Any) -> float | None:
    """Return over how many numbers each of `result` is a mean, if `function` computes means; else None."""
    name = getattr(function, "__name__", "")
    if not (name in _MEANS or name.endswith("_loss")) or options.get("reduction", "mean") not in ("mean", "batchmean"):
        return None
    given = next(each for each in (*args, *options.values()) if isinstance(each, Tensor))
    return given.numel() / result.numel() if isinstance(result, Tensor) and result.numel() else None


def options_of(function: Any, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return the options of a call for the `__torch_function__` that calls this: torch leaves out a weight."""
    if function is F.l1_loss and (weight := sys._getframe(3).f_locals.get("weight")) is not None:
        return (options or {}) | {"weight": weight}
    return options or {}


@contextlib.contextmanager
def changed(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within: `divisor` returns what `change` makes of the number of targets."""
    _changes.append(change)
    try:
        yield
    finally:
        _changes.pop()


def divisor(number: Tensor) -> Tensor:
    """Return what to divide a sum over `number` targets by."""
    for change in reversed(_changes):
        number = change(number)
    return number
