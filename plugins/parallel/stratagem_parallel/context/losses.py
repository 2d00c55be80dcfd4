"""Means over the targets of whole sequences, where each rank has a part: see [Note: divisors] in `target_numbers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem_parallel.target_numbers import divisor, mean_over_targets, reduction_of

if TYPE_CHECKING:
    from stratagem.api import Collectives


def mean_per_rank(count: Tensor, over: Collectives) -> Tensor:
    """Return the mean of `count` over the ranks of `over`. Collective."""
    return over.unchecked.all_reduce(count.detach(), "sum") / over.world_size


class MeanOverAllTargets:
    """Replaces a loss that counts targets, whose arguments it takes: means count the targets of all ranks.

    Args:
        loss: one of `target_numbers.LOSSES`.
    """

    def __init__(self, loss: Callable[..., Tensor], over: Collectives) -> None:
        self.loss, self.over = loss, over
        self.__name__ = loss.__name__  # torch calls this object in place of `loss` for activations that `tensor` cuts
        #: Whether a step runs; a reference that is kept and called at another time computes as torch does.
        self.is_active: Callable[[], bool] = lambda: True
        #: True within a call that computes no sum.
        self.is_inside = False

    @torch._disable_dynamo  # a compiled step calls it as it is
    def __call__(self, *args: Any, **options: Any) -> Tensor:
        if not self.is_active():
            return self.loss(*args, **options)
        # torch calls this object a second time, for the sum, where a mode looks at functions
        before, self.is_inside = self.is_inside, self.is_inside or reduction_of(self.loss, args, options) != "sum"
        try:
            found = mean_over_targets(self.loss, args, options)
            if found is None:
                return self.loss(*args, **options)
            number, total = found[0], found[1]()
            return total / divisor(mean_per_rank(number, self.over)).to(total.dtype)
        finally:
            self.is_inside = before
