"""Gradients in fp16, scaled by the largest one: none overflows, and few become zero."""

from collections.abc import Generator

from attrs import define
from torch import Tensor

from stratagem.api import GRADIENT_BUCKETS, SIXTEEN_BIT_GRADIENTS, Capabilities, hookimpl
from stratagem_buckets import Bucket, CommHook


@define(eq=False, kw_only=True)
class ScaledFP16(CommHook):
    """Half the bytes of fp32, and a second message of one number for each bucket."""

    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, conflicts={SIXTEEN_BIT_GRADIENTS})

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Generator[Tensor, Tensor, Tensor]:
        gradients = bucket.buffer
        largest = yield gradients.abs().amax().float().reshape(1)  # comes back as the mean over the ranks
        scale = largest.where(largest > 0, 1.0)
        average = yield (gradients / scale).half()  # at most the number of ranks
        return gradients.copy_(average * scale)
