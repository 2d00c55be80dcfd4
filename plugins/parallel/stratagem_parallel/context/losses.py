"""Means over the targets of whole sequences, where each rank has a part and some targets are ignored.

The loss of a step is the mean over the ranks. That is the mean over all targets only if every rank has as many; so the
sum on a rank is divided by the mean number of targets of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem_parallel.target_numbers import divisor, number_of

if TYPE_CHECKING:
    from stratagem.api import Collectives


def mean_per_rank(count: Tensor, over: Collectives) -> Tensor:
    """Return the mean of `count` over the ranks of `over`. Collective."""
    return over.unchecked.all_reduce(count.detach(), "sum") / over.world_size


class MeanOverAllTargets:
    """Replaces ``cross_entropy`` or ``nll_loss``, whose signatures it has: means count the targets of all ranks.

    Args:
        loss: torch's function.
    """

    def __init__(self, loss: Callable[..., Tensor], over: Collectives) -> None:
        self.loss, self.over = loss, over
        self.__name__ = loss.__name__  # torch calls this object in place of `loss` for activations that `tensor` cuts
        #: Whether a step runs; a reference that is kept and called at another time computes as torch does.
        self.is_active: Callable[[], bool] = lambda: True
        #: True within a call that computes no sum.
        self.is_inside = False

    @torch._disable_dynamo  # a compiled step calls it as it is
    def __call__(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,  # noqa: A002
        ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", **options: Any,
    ) -> Tensor:  # fmt: skip
        if not self.is_active():
            return self.loss(input, target, weight, size_average, ignore_index, reduce, reduction, **options)
        # torch calls this object a second time, for the sum, where a mode looks at functions
        before, self.is_inside = self.is_inside, self.is_inside or (reduction != "sum" and size_average is not False)
        try:
            if reduction != "mean" or size_average is not None or reduce is not None or target.is_floating_point():
                return self.loss(input, target, weight, size_average, ignore_index, reduce, reduction, **options)
            total = self.loss(input, target, weight, ignore_index=ignore_index, reduction="sum", **options)
            return total / divisor(mean_per_rank(number_of(target, weight, ignore_index), self.over)).to(total.dtype)
        finally:
            self.is_inside = before
