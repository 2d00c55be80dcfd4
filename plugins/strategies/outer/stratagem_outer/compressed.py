"""Averages that send fewer bits than their message has."""

from __future__ import annotations

import torch
from torch import Tensor

from stratagem.api import Collectives

#: Bytes of the scale that follows each piece of a message, as an fp32 number.
_SCALE_BYTES = 4


def mean_in_fp16(message: Tensor, across: Collectives) -> Tensor:
    """Return the average of `message`, which travels in 16 bits."""
    return across.average_async(message.half()).wait().to(message.dtype)


def mean_in_int8(message: Tensor, across: Collectives) -> Tensor:
    """Return the average of `message`, which travels in 8 bits, the same on all ranks.

    Each rank averages a piece of the message, and tells the others: rounded twice, and as many bytes at any number of
    ranks. A piece that is not finite somewhere is not finite in the average.
    """
    ranks = across.world_size
    size = -(-message.numel() // ranks)
    padded = torch.cat([message, message.new_zeros(ranks * size - message.numel())])
    sent = torch.cat([_packed(piece) for piece in padded.view(ranks, size)])
    received = across.all_to_all_async(sent).wait().view(ranks, -1)
    mean = torch.stack([_unpacked(piece) for piece in received]).mean(0)
    everyone = across.all_gather_async(_packed(mean)).wait().view(ranks, -1)
    return torch.cat([_unpacked(piece) for piece in everyone])[: message.numel()].to(message.dtype)


def _packed(piece: Tensor) -> Tensor:
    """Return `piece` in 8 bits, its scale behind it: (n + 4,) int8."""
    scale = (piece.abs().amax() / 127).float()
    numbers = piece.float().div(scale.where(scale > 0, 1.0)).round_().clamp_(-127, 127).nan_to_num_(0.0)
    return torch.cat([numbers.to(torch.int8), scale.reshape(1).view(torch.int8)])


def _unpacked(packed: Tensor) -> Tensor:
    """Return the fp32 numbers of `_packed`."""
    scale = packed[-_SCALE_BYTES:].clone().view(torch.float32)
    return packed[:-_SCALE_BYTES].float() * scale
