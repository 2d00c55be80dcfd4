"""Batches of similar length, so that padding to the longest of a batch adds little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from stratagem.errors import ConfigError


class LengthGroupedSampler(Sampler[int]):
    """Draws random groups of samples in each epoch, and sorts each by length: neighbours have similar lengths.

    Groups are sorted from long to short and from short to long in turn, an even number of them. So batches over the
    border of two groups are similar, too, and so are the first samples to the last, after which a division over
    processes repeats them. The longest sample comes first: a batch that is too large for the memory fails at once.

    stratagem deals this order out to processes, one sample each in turn: their batches of one step are neighbours.
    Random numbers are those of torch's generator.

    Args:
        lengths: of each sample of the data set.
        group_size: samples that are sorted together at most, such as 50 times the samples of a step on all processes.
            More have less padding; fewer have batches that are more random.

    Raises:
        ConfigError: no lengths, or no samples in a group.
    """

    def __init__(self, lengths: Sequence[int], group_size: int) -> None:
        if not len(lengths) or group_size < 1:
            raise ConfigError(
                f"LengthGroupedSampler got {len(lengths)} lengths and group_size={group_size}",
                expected="at least one of each",
            )
        self.lengths, self.group_size = torch.as_tensor(lengths), group_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        longest = int(self.lengths[order].argmax())
        order[[0, longest]] = order[[longest, 0]]
        groups = order.tensor_split(2 * math.ceil(len(self) / (2 * self.group_size)))
        for number, group in enumerate(groups):
            yield from group[self.lengths[group].argsort(descending=number % 2 == 0)].tolist()
