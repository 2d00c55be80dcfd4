"""Send the signs of gradients: a thirty-second of the bytes of fp32."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import define, field
from torch import Tensor

from stratagem import hookimpl
from stratagem.options import at_least
from stratagem_comm_hooks.two_phases import InTwoPhases, first_numbers


@define(eq=False, kw_only=True)
class OneBit(InTwoPhases):
    """Each gradient travels as its sign, with the mean of the absolute values in its chunk; what that takes is returned
    with the next steps, always: signs alone do not converge.

    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes
    SignSGD", ICML 2019; averaged as in Tang et al., "1-bit Adam", ICML 2021. Made for SGD, with momentum or without: an
    optimizer that divides by the size of past gradients sees the noise of the signs in it.
    """

    #: Optimizer steps before that send whole gradients, while they change fast: fewer save bytes, more start better.
    start_iter: int = field(default=100, validator=at_least(0))

    innermost = True

    @hookimpl
    def reduce_bucket(self, bucket, collectives, run):
        if self.steps(run) >= self.start_iter:
            return (yield from self.compressed(bucket, Signs(), collectives, run))
        average = yield bucket.buffer
        self.see(average, run)
        return average


class Signs:
    """A row is its mean absolute value, then a bit for each number."""

    multiple: ClassVar[int] = 8

    def encode(self, rows: Tensor, sizes: Tensor) -> Tensor:
        means = rows.abs().sum(1, keepdim=True) / sizes.clamp(min=1).view(-1, 1)  # nan or inf if a number is
        bits = (rows >= 0).view(len(rows), -1, 8)
        packed = (bits * _weights(rows.device)).sum(-1, dtype=torch.uint8)
        return torch.cat([means.to(rows.dtype).view(torch.uint8), packed], 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        means = first_numbers(codes, dtype)
        bits = (codes[:, dtype.itemsize :, None] & _weights(codes.device)).bool().flatten(1)
        return torch.where(bits, means, -means)


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
