"""Send gradients as fp16 or bf16: half the bytes of fp32, with a rounding error that rarely matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, hookimpl
from stratagem.api.capabilities import CHECKS_GRADIENTS
from stratagem_comm_hooks.error_feedback import as_real
from stratagem_comm_hooks.lossy import LossyHook

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import RunContext
    from stratagem_buckets import Bucket


@define(eq=False, kw_only=True)
class _Compress(LossyHook):
    """Cast to `dtype`, average, cast back."""

    dtype: ClassVar[torch.dtype]
    single_message = True
    capabilities = Capabilities(
        requires={GRADIENT_BUCKETS}, provides={CHECKS_GRADIENTS}, conflicts={SIXTEEN_BIT_GRADIENTS}
    )

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, run: RunContext) -> Generator[Any, Any, torch.Tensor]:
        average = bucket.buffer
        if average.dtype.itemsize <= self.dtype.itemsize:
            reply = average = yield average  # nothing to gain
        else:
            values = as_real(average)
            reply = yield values.to(self.dtype)
            values.copy_(reply)
        self.check(reply, run)  # half the bytes, and finite exactly if the copy is
        return average


@define(eq=False, kw_only=True)
class FP16Compress(_Compress):
    """Send gradients as fp16: ten bits of mantissa; values above 65504 become inf."""

    dtype = torch.float16


@define(eq=False, kw_only=True)
class BF16Compress(_Compress):
    """Send gradients as bf16: the range of fp32, seven bits of mantissa."""

    dtype = torch.bfloat16
