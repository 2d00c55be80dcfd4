"""Send gradients in 16 bits: half the bytes of fp32, for a rounding that training rarely notices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, hookimpl
from stratagem_comm_hooks.lossy import Lossy
from stratagem_comm_hooks.owed import as_real

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Bucket, RunContext


@define(eq=False, kw_only=True)
class _Compress(Lossy):
    """Cast, average, cast back."""

    dtype: ClassVar[torch.dtype]
    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, run: RunContext) -> Generator[Any, Any, torch.Tensor]:
        average = bucket.buffer
        if average.dtype.itemsize <= self.dtype.itemsize:
            average = yield average  # nothing to gain
        else:
            numbers = as_real(average)
            numbers.copy_((yield numbers.to(self.dtype)))
        self.see(average, run)
        return average


@define(eq=False, kw_only=True)
class FP16Compress(_Compress):
    """Gradients travel as fp16: ten bits of mantissa, and an overflow to inf above 65504."""

    dtype = torch.float16


@define(eq=False, kw_only=True)
class BF16Compress(_Compress):
    """Gradients travel as bf16: the range of fp32, seven bits of mantissa."""

    dtype = torch.bfloat16
