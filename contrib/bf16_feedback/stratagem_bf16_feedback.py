"""Send gradients in bf16, and return with the next step what rounding took from this one (error feedback)."""

from __future__ import annotations

import torch
from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, CommHook, hookimpl
from stratagem.api.per_run import PerRun


@define(eq=False, kw_only=True)
class BF16Feedback(CommHook):
    """Half the bytes of fp32, and the error does not add up.

    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
    """

    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})
    #: What is still to be sent, by bucket.
    _residuals: PerRun[dict[tuple[int, int], torch.Tensor]] = field(init=False, factory=lambda: PerRun(dict))

    @hookimpl
    def reduce_bucket(self, bucket, run):
        residuals = self._residuals.of(run)
        key = (bucket.index, bucket.buffer.numel())
        wanted = bucket.buffer + residuals[key] if key in residuals else bucket.buffer
        sent = wanted.bfloat16()
        residuals[key] = torch.nan_to_num(wanted - sent, 0.0, 0.0, 0.0)  # an overflow leaves none
        return bucket.buffer.copy_((yield sent))
