"""Send gradients as bf16, and add the rounding error to the next step (error feedback)."""

from __future__ import annotations

import torch
from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, hookimpl
from stratagem.api.per_run import PerRun
from stratagem_buckets import CommHook


@define(eq=False, kw_only=True)
class BF16Feedback(CommHook):
    """Send half the bytes of fp32; rounding errors do not accumulate.

    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
    """

    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})
    #: The rounding errors of the last step, by bucket: its index, size and parameters, which DDP may reorder.
    _residuals: PerRun[dict[str, torch.Tensor]] = field(init=False, factory=lambda: PerRun(dict))
    #: Names of parameters, by id: a checkpoint needs names.
    _names: PerRun[dict[int, str]] = field(init=False, factory=lambda: PerRun(dict))

    @hookimpl
    def reduce_bucket(self, bucket, run):
        residuals = self._residuals.of(run)
        key = self._key(bucket, run)
        scale = run.gradient_scale  # differs between steps whose losses are sums of targets
        corrected = bucket.buffer + residuals[key] * scale if key in residuals else bucket.buffer
        sent = corrected.bfloat16()
        residuals[key] = torch.nan_to_num((corrected - sent) / scale, 0.0, 0.0, 0.0)  # an overflow leaves none
        return bucket.buffer.copy_((yield sent))

    def _key(self, bucket, run):
        names = self._names.of(run)
        if run.module is not None and not names:
            names.update((id(parameter), name) for name, parameter in run.module.named_parameters())
        parameters = [str(names.get(id(parameter), id(parameter))) for parameter in bucket.parameters]
        return " ".join([str(bucket.index), str(bucket.buffer.numel()), *parameters])

    def rank_state(self, run):
        return {"residuals": dict(self._residuals.of(run))}

    def load_rank_states(self, states, run):
        if len(states) == run.world_size:  # other ranks had other errors: they are too small to be missed
            self._residuals.of(run).update(states[run.rank]["residuals"])
