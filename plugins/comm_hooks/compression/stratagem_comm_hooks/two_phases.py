"""Average what is compressed: each rank averages a chunk of the bucket, and sends the result to all, compressed again.

The compressed all-reduce of Tang et al., "1-bit Adam", ICML 2021. Sums of codes are no codes, so an all-reduce cannot
add them up; and gathering all codes everywhere would cost more with each rank. Here each of n ranks sends 2 (n-1)/n of
its bucket in codes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from attrs import define, frozen
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stratagem.api import Bucket, Collectives
from stratagem_comm_hooks.feedback import Feedback
from stratagem_comm_hooks.owed import Chunk, Layout, Owed, as_real

if TYPE_CHECKING:
    from stratagem.api import RunContext


class Code(Protocol):
    """Turns rows of numbers into rows of bytes, and back."""

    #: Numbers in a row are a multiple of this.
    multiple: ClassVar[int]

    def encode(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Return ``(rows, length)`` as uint8; from `sizes` on, a row is padded with zeros."""

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what `encode` was given, as far as its codes tell: nan or inf, too, of what was not finite."""


@frozen
class Chunks:
    """How a bucket is cut: one chunk for each rank, the last ones padded."""

    numbers: int
    ranks: int
    length: int

    @classmethod
    def of(cls, numbers: int, ranks: int, multiple: int) -> Chunks:
        """Cut as evenly as a `multiple` allows."""
        return cls(numbers, ranks, -(-numbers // (ranks * multiple)) * multiple)

    def start(self, rank: int) -> int:
        return min(rank * self.length, self.numbers)

    def size(self, rank: int) -> int:
        return self.start(rank + 1) - self.start(rank)

    def sizes(self, device: torch.device) -> Tensor:
        # Computed there: a list that is copied there would have to be waited for.
        return (self.numbers - torch.arange(self.ranks, device=device) * self.length).clamp_(0, self.length)


@define(eq=False, kw_only=True)
class InTwoPhases(Feedback):
    """A hook that sends in a code of its own."""

    def compressed(
        self, bucket: Bucket, code: Code, collectives: Collectives, run: RunContext, *, feedback: bool = True
    ) -> Generator[Any, Any, Tensor]:
        """Average `bucket`, sent in `code`; owe what that takes if there is to be `feedback`."""
        if collectives.world_size > 1:
            owed = self.owed(run)
            place = owed.place(bucket)
            layout, rest, chunk = yield from _average(bucket, code, owed, place, collectives, run)
        finite = self.see(bucket.buffer, run)
        if feedback and collectives.world_size > 1:
            owed.keep(rest, layout, finite)
            owed.keep_chunk(place, chunk, finite)
        return bucket.buffer


def _average(
    bucket: Bucket, code: Code, owed: Owed, place: str, collectives: Collectives, run: RunContext
) -> Generator[Any, Any, tuple[Layout, Tensor, Chunk]]:
    """Write the average of `bucket` over the ranks into it; return its layout and what the codes did not tell."""
    ranks, rank = collectives.world_size, collectives.rank
    layout = owed.layout(bucket, place, run)
    numbers = owed.plus(bucket, layout)
    cut = Chunks.of(numbers.numel(), ranks, code.multiple)
    sizes = cut.sizes(numbers.device)

    rows = F.pad(numbers, (0, ranks * cut.length - numbers.numel())).view(ranks, cut.length)
    codes = code.encode(rows, sizes)
    rest = (rows - code.decode(codes, rows.dtype)).view(-1)[: numbers.numel()]
    codes = (yield collectives.all_to_all_async(codes.view(-1))).view(ranks, -1)

    mine = code.decode(codes, rows.dtype).mean(0)[: cut.size(rank)]
    mine += owed.of_chunk(place, layout, cut.start(rank), mine)
    padded = F.pad(mine, (0, cut.length - mine.numel())).view(1, -1)
    codes = code.encode(padded, sizes[rank : rank + 1])
    chunk_rest = mine - code.decode(codes, rows.dtype)[0, : mine.numel()]
    codes = (yield collectives.all_gather_async(codes.view(-1))).view(ranks, -1)

    as_real(bucket.buffer).copy_(code.decode(codes, rows.dtype).view(-1)[: numbers.numel()])
    return layout, rest, Chunk(layout, cut.start(rank), ranks, chunk_rest)


def first_numbers(codes: Tensor, dtype: torch.dtype, count: int = 1) -> Tensor:
    """Return the numbers that each row of `codes` begins with: (rows, count)."""
    # A copy, as bytes are read as numbers only where numbers may begin.
    return codes[:, : count * dtype.itemsize].reshape(-1).clone().view(dtype).view(-1, count)
