"""Check that ranks which share samples got the same: otherwise they would compute parts of different batches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from stratagem.errors import ConfigError
from stratagem_process_group.comparison import are_equal

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext


class SameBatches:
    """Compares batches over the ranks of `over`, which are to read the same ones."""

    def __init__(self, over: Collectives) -> None:
        self.over = over
        self._seen: Counter[str] = Counter()

    def check(self, batch: Any, run: RunContext) -> None:
        """Compare the first batch of a stage, the second, the fourth and so on. Collective for these.

        Raises:
            ConfigError: ranks got different batches; raised on all of them.
        """
        self._seen[run.stage] += 1
        number = self._seen[run.stage]
        if not is_due(number):
            return
        if not are_equal(fingerprint(batch), self.over):
            raise ConfigError(
                f"ranks that share samples got different batches (batch {number} of stage {run.stage!r})",
                expected="the same samples on all ranks of the axes pipeline, context and tensor",
                do="call stratagem.seed_everything() first, and make random samples and augmentations of the index and "
                "the epoch; a loader with its own sampler shards by run.mesh.data_shard",
            )


def is_due(number: int) -> bool:
    """Return whether batch `number`, from 1, is one of 1, 2, 4, 8 and so on: a single check can pass by chance."""
    return not number & (number - 1)


def fingerprint(batch: Any) -> torch.Tensor:
    """Return two numbers that depend on shapes and values of all tensors of `batch`, and on their order."""
    total, shapes = torch.zeros((), dtype=torch.float64), 0
    for index, tensor in enumerate(each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)):
        shapes = (31 * shapes + sum((place + 7) * size for place, size in enumerate(tensor.shape)) + index) % 2**31
        total += weighted_sum(tensor).cpu() * (index + 1)
    return torch.stack([total, torch.tensor(float(shapes), dtype=torch.float64)])


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on the values of `tensor` and their places."""
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).to(torch.float64).flatten().nan_to_num()
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64).sqrt()).sum()
