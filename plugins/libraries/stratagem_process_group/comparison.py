"""Compare numbers between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stratagem.api import Collectives


def are_equal(mine: torch.Tensor, over: Collectives) -> bool:
    """Whether all ranks of `over` have the same numbers, which are on the CPU: no host waits for its GPU. Collective.

    The largest and the smallest of all ranks are equal. Not checked, as all ranks do this in each step.
    """
    largest, smallest = over.unchecked.all_reduce(torch.stack([mine, -mine]), "max")
    return torch.equal(largest, -smallest)
