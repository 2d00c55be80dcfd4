"""Send the signs of gradients: 1/32 of the bytes of fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import Attribute, define, field, frozen
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stratagem.api import hookimpl
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_comm_hooks.compressed_allreduce import CompressedAllReduceHook, leading_values

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Bucket, Collectives, RunContext


def _multiple_of_8(hook: Any, attribute: Attribute[Any], value: Any) -> None:
    if isinstance(value, int) and (value < 8 or value % 8):
        raise ConfigError(
            f"{type(hook).__name__}.{attribute.name} is {value}", expected="a multiple of 8: a byte of signs"
        )


@define(eq=False, kw_only=True)
class OneBit(CompressedAllReduceHook):
    """Send the sign of each gradient, and the mean absolute value of each block. Error feedback is always on: training
    with signs alone does not converge.

    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes
    SignSGD", ICML 2019; in blocks as in Zheng et al., "Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019;
    averaged as in Tang et al., "1-bit Adam", ICML 2021. Made for SGD, with momentum or without: optimizers that
    divide by the magnitude of past gradients, such as Adam, amplify the noise of the signs.
    """

    #: Number of first steps without compression, while gradients change fast: fewer save bytes, more start better.
    start_iter: int = field(default=100, validator=at_least(0))

    #: Elements that share a mean, a multiple of 8: smaller follows layers of different magnitude, but sends more means.
    block_size: int = field(default=1024, validator=_multiple_of_8)

    innermost = True

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, collectives: Collectives, run: RunContext) -> Generator[Any, Any, Tensor]:
        if self.steps(run) >= self.start_iter:
            return (yield from self.compressed(bucket, SignCodec(self.block_size), collectives, run))
        average: Tensor = yield bucket.buffer
        self.check(average, run)
        return average


@frozen
class SignCodec:
    """Encode a row as the mean absolute value of each block, then one bit for each element."""

    multiple: ClassVar[int] = 8

    block_size: int

    def encode(self, rows: Tensor, sizes: Tensor) -> Tensor:
        count, length = rows.shape
        blocks = F.pad(rows, (0, -length % self.block_size)).view(count, -1, self.block_size)
        starts = torch.arange(blocks.shape[1], device=rows.device) * self.block_size
        counts = (sizes.view(-1, 1) - starts).clamp(1, self.block_size)
        means = (blocks.abs().sum(-1) / counts).to(rows.dtype)  # nan or inf if an element is
        bits = (rows >= 0).view(count, -1, 8)
        packed = (bits * _bit_values(rows.device)).sum(-1, dtype=torch.uint8)
        return torch.cat([means.view(torch.uint8), packed], 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        num_blocks = -(-codes.shape[1] // (dtype.itemsize + self.block_size // 8))  # the last one may be shorter
        means = leading_values(codes, dtype, num_blocks).repeat_interleave(self.block_size, 1)
        bits = (codes[:, num_blocks * dtype.itemsize :, None] & _bit_values(codes.device)).bool().flatten(1)
        means = means[:, : bits.shape[1]]
        return torch.where(bits, means, -means)


def _bit_values(device: torch.device) -> Tensor:
    # Computed on the device: a copy of a list would make the host wait.
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)  # 1, 2, 4 ... 128
