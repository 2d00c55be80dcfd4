"""Send gradients in 16 bits: half the bytes of fp32, for a rounding that training rarely notices."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import define

from stratagem import Capabilities, CommHook, hookimpl
from stratagem.plugin import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS


@define(eq=False, kw_only=True)
class _Compress(CommHook):
    """Cast, average, cast back."""

    dtype: ClassVar[torch.dtype]
    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})

    @hookimpl
    def reduce_bucket(self, bucket, average):
        buffer = bucket.buffer
        if buffer.dtype.itemsize <= self.dtype.itemsize:
            return average(buffer)  # nothing to gain
        # A complex number is two real ones; a cast would drop the second.
        numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer

        def decompress(future):
            numbers.copy_(future.value())
            return buffer

        return average(numbers.to(self.dtype)).then(decompress)


@define(eq=False, kw_only=True)
class FP16Compress(_Compress):
    """Gradients travel as fp16: ten bits of mantissa, and an overflow to inf above 65504."""

    dtype = torch.float16


@define(eq=False, kw_only=True)
class BF16Compress(_Compress):
    """Gradients travel as bf16: the range of fp32, seven bits of mantissa."""

    dtype = torch.bfloat16
