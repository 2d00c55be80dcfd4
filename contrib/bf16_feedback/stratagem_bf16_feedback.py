"""Send gradients in bf16, and return with the next step what rounding took from this one (error feedback)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, CommHook, hookimpl


@define(eq=False, kw_only=True)
class BF16Feedback(CommHook):
    """Half the bytes of fp32, and the error does not add up.

    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
    """

    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})
    #: What is still to be sent, by run and bucket: a run begins with nothing, and leaves nothing.
    _owed: Any = field(init=False, factory=weakref.WeakKeyDictionary)

    @hookimpl
    def reduce_bucket(self, bucket, run):
        owed = self._owed.setdefault(run, {})
        place = (bucket.index, bucket.buffer.numel())
        wanted = bucket.buffer + owed[place] if place in owed else bucket.buffer
        sent = wanted.bfloat16()
        owed[place] = torch.nan_to_num(wanted - sent, 0.0, 0.0, 0.0)  # an overflow is not owed
        return bucket.buffer.copy_((yield sent))

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self._owed = weakref.WeakKeyDictionary()
