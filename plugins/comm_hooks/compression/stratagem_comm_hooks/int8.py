"""Send gradients in 8 bits: a quarter of the bytes of fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import define
from torch import Tensor

from stratagem.api import hookimpl
from stratagem_comm_hooks.two_phases import InTwoPhases, first_numbers

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Bucket, Collectives, RunContext

_LARGEST: Final = 127


@define(eq=False, kw_only=True)
class Int8(InTwoPhases):
    """Gradients travel as whole numbers from -127 to 127, with a scale for each chunk.

    Averaged by the compressed all-reduce of Tang et al., "1-bit Adam", ICML 2021. Gradients that differ much in size
    within a bucket lose the small ones for a while: smaller buckets help, and so does the feedback.
    """

    #: Return with the next step what rounding took from this one: costs the memory of the gradients, in fp32.
    error_feedback: bool = True

    innermost = True

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, collectives: Collectives, run: RunContext) -> Generator[Any, Any, Tensor]:
        return (yield from self.compressed(bucket, WholeNumbers(), collectives, run, feedback=self.error_feedback))


class WholeNumbers:
    """A row is its scale, then a byte for each number."""

    multiple: ClassVar[int] = 1

    def encode(self, rows: Tensor, sizes: Tensor) -> Tensor:
        scales = rows.abs().amax(1, keepdim=True) / _LARGEST  # (rows, 1); nan or inf if a number is
        numbers = (rows / scales.masked_fill(scales == 0, 1.0)).round_().clamp_(-_LARGEST, _LARGEST)
        return torch.cat([scales.view(torch.uint8), numbers.to(torch.int8).view(torch.uint8)], 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        # Zero times an infinite scale is nan: a row with a number that is not finite has no finite one left.
        return codes[:, dtype.itemsize :].view(torch.int8) * first_numbers(codes, dtype)
