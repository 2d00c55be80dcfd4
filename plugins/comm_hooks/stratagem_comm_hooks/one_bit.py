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
from stratagem_comm_hooks.compressed_allreduce import CompressedAllReduceHook, leading_values, pieces

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from stratagem.api import Collectives, RunContext
    from stratagem_buckets import Bucket


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
        starts = torch.arange(0, length, self.block_size, device=rows.device)
        counts = (sizes.view(-1, 1) - starts).clamp(1, self.block_size)
        means, signs = rows.new_empty(counts.shape), _signs(rows.dtype, rows.device)
        packed = torch.empty(count, length // 8, dtype=torch.uint8, device=rows.device)
        for part in pieces(count, length, self.block_size, rows.device):
            values, blocks, octets = rows[:, part], self._blocks(part), _octets(part)
            whole = F.pad(values, (0, -values.shape[1] % self.block_size)).abs().view(count, -1, self.block_size)
            means[:, blocks] = whole.sum(-1) / counts[:, blocks]  # nan or inf if an element is
            packed[:, octets] = _pack(values >= 0)
            values -= self._scaled(signs, packed[:, octets], means[:, blocks])
        return torch.cat([means.view(torch.uint8), packed], 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        num_blocks = -(-codes.shape[1] // (dtype.itemsize + self.block_size // 8))  # the last one may be shorter
        means, packed = leading_values(codes, dtype, num_blocks), codes[:, num_blocks * dtype.itemsize :]
        signs = _signs(dtype, codes.device)
        for part in pieces(len(codes), packed.shape[1] * 8, self.block_size, codes.device):
            yield part, self._scaled(signs, packed[:, _octets(part)], means[:, self._blocks(part)])

    def _blocks(self, part: slice) -> slice:
        return slice(part.start // self.block_size, -(-part.stop // self.block_size))

    def _scaled(self, signs: Tensor, packed: Tensor, means: Tensor) -> Tensor:
        """Return the `means` of blocks, with the sign of each element."""
        values = signs.index_select(0, packed.reshape(-1).int()).view(len(packed), -1)
        if values.shape[1] % self.block_size == 0:
            values.view(*means.shape, self.block_size).mul_(means[..., None])
            return values
        return values.mul_(means.repeat_interleave(self.block_size, 1)[:, : values.shape[1]])


def _octets(part: slice) -> slice:
    return slice(part.start // 8, part.stop // 8)


def _pack(bits: Tensor) -> Tensor:
    """Return uint8 that hold eight `bits` each, the first one in the lowest bit."""
    # Little-endian: byte i of a number is element i; the product has bit 0 of all bytes, in order, in its last byte.
    return (bits.contiguous().view(torch.int64) * 0x0102040810204080).view(torch.uint8)[:, 7::8]


def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 1.0 and -1.0 for the eight bits of each byte: (256, 8)."""
    # Computed on the device: a copy of a list would make the host wait.
    byte, bit = torch.arange(256, device=device).view(-1, 1), torch.arange(8, device=device)
    return ((byte >> bit) & 1).to(dtype) * 2 - 1
