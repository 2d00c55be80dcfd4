"""What means over targets are divided by, where a rank sees only some of the targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Those that run, the last innermost.
_changes: list[Callable[[Tensor], Tensor]] = []


def number_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number of class targets that are not ignored, or the sum of their weights."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight[target.where(counts, 0)], 0).sum()


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
