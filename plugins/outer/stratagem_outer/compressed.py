"""Averages that send fewer bits than the message has."""

from __future__ import annotations

import torch
from torch import Tensor

from stratagem.api import Collectives

#: Bytes of the fp32 scale that follows each chunk of a message.
_SCALE_BYTES = 4


def mean_in_fp16(message: Tensor, group: Collectives) -> Tensor:
    """Return the average of `message`, sent as fp16."""
    return group.average_async(message.half()).wait().to(message.dtype)


def mean_in_int8(message: Tensor, group: Collectives) -> Tensor:
    """Return the average of `message`, sent as int8, which is equal on all ranks.

    Each rank averages one chunk of the message (all-to-all) and sends the result to the others (all-gather): values are
    rounded twice, and the number of bytes does not depend on the number of ranks. A chunk that has a value that is not
    finite is not finite in the average.
    """
    ranks = group.world_size
    size = -(-message.numel() // ranks)
    padded = torch.cat([message, message.new_zeros(ranks * size - message.numel())])
    sent = torch.cat([_quantize(chunk) for chunk in padded.view(ranks, size)])
    received = group.all_to_all_async(sent).wait().view(ranks, -1)
    mean = torch.stack([_dequantize(chunk) for chunk in received]).mean(0)
    everyone = group.all_gather_async(_quantize(mean)).wait().view(ranks, -1)
    return torch.cat([_dequantize(chunk) for chunk in everyone])[: message.numel()].to(message.dtype)


def _quantize(chunk: Tensor) -> Tensor:
    """Return `chunk` as int8, followed by its scale: (n + 4,) int8."""
    scale = (chunk.abs().amax() / 127).float()
    numbers = chunk.float().div(scale.where(scale > 0, 1.0)).round_().clamp_(-127, 127).nan_to_num_(0.0)
    return torch.cat([numbers.to(torch.int8), scale.reshape(1).view(torch.int8)])


def _dequantize(packed: Tensor) -> Tensor:
    """Return the fp32 values of what `_quantize` returned."""
    scale = packed[-_SCALE_BYTES:].clone().view(torch.float32)
    return packed[:-_SCALE_BYTES].float() * scale
