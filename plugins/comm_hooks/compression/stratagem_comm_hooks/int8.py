"""Send gradients as int8: a quarter of the bytes of fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import define
from torch import Tensor

from stratagem.api import hookimpl
from stratagem_comm_hooks.compressed_allreduce import CompressedAllReduceHook, leading_values

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Bucket, Collectives, RunContext

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
        scales = rows.abs().amax(1, keepdim=True) / _MAX  # (rows, 1); nan or inf if an element is
        integers = (rows / scales.masked_fill(scales == 0, 1.0)).round_().clamp_(-_MAX, _MAX)
        return torch.cat([scales.view(torch.uint8), integers.to(torch.int8).view(torch.uint8)], 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        # Zero times an infinite scale is nan: if one element of a row is not finite, none of the decoded row is.
        return codes[:, dtype.itemsize :].view(torch.int8) * leading_values(codes, dtype)
