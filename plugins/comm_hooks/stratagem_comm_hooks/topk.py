"""Send only the gradients with the largest magnitude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import hookimpl
from stratagem.api.validators import between, more_than
from stratagem_comm_hooks.error_feedback import as_real
from stratagem_comm_hooks.feedback_hook import FeedbackHook

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Collectives, RunContext
    from stratagem_buckets import Bucket


@define(eq=False, kw_only=True)
class TopK(FeedbackHook):
    """Each rank sends its largest gradients with their indices to all ranks; the others are kept as residual.

    Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Stich et al., "Sparsified SGD
    with Memory", NeurIPS 2018. The bytes that a rank receives grow with the number of ranks: fewer than in fp32 as
    long as `ratio` times that number is below 1.
    """

    #: Fraction of each bucket that is sent: smaller saves bytes, and delays the other gradients by more steps.
    ratio: float = field(default=0.01, validator=[more_than(0), between(0, 1)])

    innermost = True
    single_message = True

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, collectives: Collectives, run: RunContext) -> Generator[Any, Any, Tensor]:
        if collectives.world_size == 1:
            self.check(bucket.buffer, run)
            return bucket.buffer
        feedback, buffer = self.feedback(run), as_real(bucket.buffer)
        layout = feedback.layout(bucket, feedback.slot(bucket), run)
        gradients = feedback.take(bucket, layout)
        indices = _largest(gradients, self.ratio)
        values = gradients[indices].to(buffer.dtype)
        gradients[indices] -= values.to(gradients.dtype)
        received = yield collectives.all_gather_async(_pack(values, indices))

        total = buffer.zero_() if buffer.dtype == gradients.dtype else torch.zeros_like(gradients)
        for codes in received.view(collectives.world_size, -1):  # in rank order: the same bits everywhere
            values, indices = _unpack(codes, buffer.dtype)
            total.index_add_(0, indices, values.to(total.dtype))
        total.div_(collectives.world_size)
        if total is not buffer:
            buffer.copy_(total)
        feedback.keep(gradients, layout, self.check(bucket.buffer, run))
        return bucket.buffer


def _largest(gradients: Tensor, ratio: float) -> Tensor:
    """Return the indices of the largest gradients; values that are not finite count as the largest."""
    count = math.ceil(ratio * gradients.numel())
    return torch.topk(gradients.abs(), count, sorted=False).indices.to(torch.int32)


def _pack(values: Tensor, indices: Tensor) -> Tensor:
    return torch.cat([values.view(torch.uint8), indices.view(torch.uint8)])


def _unpack(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = codes.numel() // (dtype.itemsize + torch.int32.itemsize)
    values, indices = codes.split([count * dtype.itemsize, count * torch.int32.itemsize])
    return values.clone().view(dtype), indices.clone().view(torch.int32)
