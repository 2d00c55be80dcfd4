"""Send gradients as int8: a quarter of the bytes of fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import define
from torch import Tensor

from stratagem.api import hookimpl
from stratagem_comm_hooks.compressed_allreduce import CompressedAllReduceHook, leading_values, pieces

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from stratagem.api import Collectives, RunContext
    from stratagem_buckets import Bucket

_MAX: Final = 127


@define(eq=False, kw_only=True)
class Int8(CompressedAllReduceHook):
    """Send gradients as integers from -127 to 127, with one scale for each chunk.

    Averaged by the compressed all-reduce of Tang et al., "1-bit Adam", ICML 2021. Where gradients of one bucket differ
    much in magnitude, the small ones are rounded to 0 and arrive later: smaller buckets help, and so does error
    feedback.
    """

    #: Add the rounding error to the next step: costs the memory of the gradients, in fp32.
    error_feedback: bool = True

    innermost = True

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, collectives: Collectives, run: RunContext) -> Generator[Any, Any, Tensor]:
        return (yield from self.compressed(bucket, Int8Codec(), collectives, run, feedback=self.error_feedback))


class Int8Codec:
    """Encode a row as its scale, then one byte for each element."""

    multiple: ClassVar[int] = 1

    def encode(self, rows: Tensor, sizes: Tensor) -> Tensor:
        parts = list(pieces(len(rows), rows.shape[1], self.multiple, rows.device))
        largest = torch.stack([rows[:, part].abs().amax(1) for part in parts]).amax(0)  # nan or inf if an element is
        scales = largest.view(-1, 1) / _MAX
        divisors = scales.masked_fill(scales == 0, 1.0)
        codes = torch.empty(len(rows), rows.itemsize + rows.shape[1], dtype=torch.uint8, device=rows.device)
        codes[:, : rows.itemsize] = scales.view(torch.uint8)
        integers = codes[:, rows.itemsize :].view(torch.int8)
        for part in parts:
            rounded = (rows[:, part] / divisors).round_().clamp_(-_MAX, _MAX)
            integers[:, part] = rounded
            rows[:, part] -= rounded.mul_(scales)
        return codes

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        integers, scales = codes[:, dtype.itemsize :].view(torch.int8), leading_values(codes, dtype)
        for part in pieces(len(integers), integers.shape[1], self.multiple, codes.device):
            # Zero times an infinite scale is nan: if one element of a row is not finite, none of the decoded row is.
            yield part, integers[:, part].to(dtype).mul_(scales)
