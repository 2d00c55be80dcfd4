"""Send the largest gradients only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import hookimpl
from stratagem.api.validators import between, more_than
from stratagem_comm_hooks.feedback import Feedback
from stratagem_comm_hooks.owed import as_real

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Bucket, Collectives, RunContext


@define(eq=False, kw_only=True)
class TopK(Feedback):
    """Each rank sends its largest gradients with their places, to all; the others wait and add up until their turn.

    Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Stich et al., "Sparsified SGD
    with Memory", NeurIPS 2018. What a rank sends grows with the number of ranks: it saves bytes of fp32 as long as
    `ratio` times that number stays below 1.
    """

    #: Share of each bucket that is sent: smaller saves bytes, and delays the rest by more steps.
    ratio: float = field(default=0.01, validator=[more_than(0), between(0, 1)])

    innermost = True

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, collectives: Collectives, run: RunContext) -> Generator[Any, Any, Tensor]:
        if collectives.world_size == 1:
            self.see(bucket.buffer, run)
            return bucket.buffer
        owed, buffer = self.owed(run), as_real(bucket.buffer)
        layout = owed.layout(bucket, owed.place(bucket), run)
        numbers = owed.plus(bucket, layout)
        places = _largest(numbers, self.ratio)
        values = numbers[places].to(buffer.dtype)
        numbers[places] -= values.to(numbers.dtype)
        received = yield collectives.all_gather_async(_pack(values, places))

        total = torch.zeros_like(numbers)
        for codes in received.view(collectives.world_size, -1):  # in rank order: the same bits everywhere
            values, places = _unpack(codes, buffer.dtype)
            total.index_add_(0, places, values.to(total.dtype))
        buffer.copy_(total.div_(collectives.world_size))
        owed.keep(numbers, layout, self.see(bucket.buffer, run))
        return bucket.buffer


def _largest(numbers: Tensor, ratio: float) -> Tensor:
    """Return the places of the largest numbers; what is not finite counts as the largest."""
    count = math.ceil(ratio * numbers.numel())
    return torch.topk(numbers.abs(), count, sorted=False).indices.to(torch.int32)


def _pack(values: Tensor, places: Tensor) -> Tensor:
    return torch.cat([values.view(torch.uint8), places.view(torch.uint8)])


def _unpack(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = codes.numel() // (dtype.itemsize + torch.int32.itemsize)
    values, places = codes.split([count * dtype.itemsize, count * torch.int32.itemsize])
    return values.clone().view(dtype), places.clone().view(torch.int32)
