"""Compressed all-reduce: an all-to-all and an all-gather of encoded chunks.

From Tang et al., "1-bit Adam", ICML 2021. A sum of encoded values is not an encoded value, so an all-reduce cannot add
them; an all-gather of whole buckets would cost more with each rank. Here each rank receives one chunk of the bucket
from every rank, averages it, encodes the average and sends it to all: each of n ranks sends 2 (n-1)/n of its bucket,
encoded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import torch
from attrs import define, frozen
from torch import Tensor

from stratagem.api import Collectives
from stratagem_buckets import Bucket
from stratagem_comm_hooks.error_feedback import Chunk, ErrorFeedback, Layout, as_real
from stratagem_comm_hooks.feedback_hook import FeedbackHook

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Elements of a temporary tensor on a CPU: 512 KiB in fp32.
_PIECE: Final = 1 << 17


class Codec(Protocol):
    """Encodes rows of values as rows of bytes, and decodes them."""

    #: The length of a row must be a multiple of this.
    multiple: ClassVar[int]

    def encode(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Return uint8 of shape ``(rows, length)``, and leave in `rows` what they lack.

        `sizes`: elements of each row; what follows is zero padding.
        """

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive columns of the decoded rows; a row that was not finite when encoded is not finite."""


def pieces(num_rows: int, length: int, multiple: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of a row, to compute in: on a CPU so short that all rows' temporary values stay in its cache."""
    step = max(1, _PIECE // (num_rows * multiple)) * multiple if device.type == "cpu" else length
    for start in range(0, length, step or 1):
        yield slice(start, min(start + step, length))


@frozen
class Chunks:
    """How a bucket is divided: one chunk for each rank, the last ones padded."""

    count: int
    ranks: int
    length: int

    @classmethod
    def of(cls, count: int, ranks: int, multiple: int) -> Chunks:
        """Divide `count` elements as evenly as `multiple` allows."""
        return cls(count, ranks, -(-count // (ranks * multiple)) * multiple)

    def start(self, rank: int) -> int:
        return min(rank * self.length, self.count)

    def size(self, rank: int) -> int:
        return self.start(rank + 1) - self.start(rank)

    def sizes(self, device: torch.device) -> Tensor:
        # Computed on the device: a copy of a list would make the host wait.
        return (self.count - torch.arange(self.ranks, device=device) * self.length).clamp_(0, self.length)


@define(eq=False, kw_only=True)
class CompressedAllReduceHook(FeedbackHook):
    """A hook that sends encoded gradients; subclasses choose the codec."""

    def compressed(
        self, bucket: Bucket, codec: Codec, collectives: Collectives, run: RunContext, *, feedback: bool = True
    ) -> Generator[Any, Any, Tensor]:
        """Average `bucket` in place, sent through `codec`; keep the residuals if `feedback` is set."""
        if collectives.world_size > 1:
            residuals = self.feedback(run)
            slot = residuals.slot(bucket)
            layout, residual, chunk = yield from _average(bucket, codec, residuals, slot, collectives, run)
        finite = self.check(bucket.buffer, run)
        if feedback and collectives.world_size > 1:
            residuals.keep(residual, layout, finite)
            residuals.keep_chunk(slot, chunk, finite)
        return bucket.buffer


def _average(
    bucket: Bucket, codec: Codec, feedback: ErrorFeedback, slot: str, collectives: Collectives, run: RunContext
) -> Generator[Any, Any, tuple[Layout, Tensor, Chunk]]:
    """Average `bucket` over the ranks in place; return its layout, its residual and that of this rank's chunk."""
    ranks, rank = collectives.world_size, collectives.rank
    layout, buffer = feedback.layout(bucket, slot, run), as_real(bucket.buffer)
    chunks = Chunks.of(buffer.numel(), ranks, codec.multiple)
    sizes = chunks.sizes(buffer.device)

    values = feedback.take(bucket, layout, ranks * chunks.length)
    codes = codec.encode(values.view(ranks, chunks.length), sizes)
    codes = (yield collectives.all_to_all_async(codes.view(-1))).view(ranks, -1)

    padded = values.new_empty(chunks.length)
    for part, decoded in codec.decode(codes, values.dtype):
        torch.mean(decoded, 0, out=padded[part])
    mine = padded[: chunks.size(rank)]
    mine += feedback.take_chunk(slot, layout, chunks.start(rank), mine)
    padded[chunks.size(rank) :] = 0.0
    codes = codec.encode(padded.view(1, -1), sizes[rank : rank + 1])
    codes = (yield collectives.all_gather_async(codes.view(-1))).view(ranks, -1)

    for part, decoded in codec.decode(codes, values.dtype):
        for number, row in enumerate(decoded):
            target = buffer[number * chunks.length :][part]  # shorter at the end of the buffer
            target.copy_(row[: len(target)])
    return layout, values, Chunk(layout, chunks.start(rank), ranks, mine)


def leading_values(codes: Tensor, dtype: torch.dtype, count: int = 1) -> Tensor:
    """Return the first `count` values of each row of `codes`: (rows, count)."""
    # A copy, because `view(dtype)` needs aligned memory.
    return codes[:, : count * dtype.itemsize].reshape(-1).clone().view(dtype).view(-1, count)
