"""Send gradients as bf16, and add the rounding error to the next step (error feedback)."""

from __future__ import annotations

import torch
from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, CommHook, hookimpl
from stratagem.api.per_run import PerRun


@define(eq=False, kw_only=True)
class BF16Feedback(CommHook):
    """Send half the bytes of fp32; rounding errors do not accumulate.

    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
    """

    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})
    #: The rounding errors of the last step, by bucket: its index, size and parameters, which DDP may reorder.
    _residuals: PerRun[dict[tuple[int, ...], torch.Tensor]] = field(init=False, factory=lambda: PerRun(dict))

    @hookimpl
    def reduce_bucket(self, bucket, run):
        residuals = self._residuals.of(run)
        key = (bucket.index, bucket.buffer.numel(), *map(id, bucket.parameters))
        corrected = bucket.buffer + residuals[key] if key in residuals else bucket.buffer
        sent = corrected.bfloat16()
        residuals[key] = torch.nan_to_num(corrected - sent, 0.0, 0.0, 0.0)  # an overflow leaves none
        return bucket.buffer.copy_((yield sent))
