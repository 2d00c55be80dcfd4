"""Clip gradients of which each rank holds some, parts of some, and copies of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from stratagem_sharding.shards import local

if TYPE_CHECKING:
    from stratagem.api import Collectives


def clip_norm(
    parameters: Sequence[nn.Parameter], copies: Callable[[nn.Parameter], int], over: Collectives, max_norm: float
) -> torch.Tensor:
    """Scale the gradients of `parameters` so that the norm of the whole model's is at most `max_norm`. Collective.

    Args:
        parameters: those of this rank that have gradients.
        copies: of how many ranks of `over` hold the same part of a parameter, which counts once.
        over: the ranks that hold the parts of one replica.

    Returns:
        The norm before.
    """
    by_copies: dict[tuple[int, torch.device], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            part = local(parameter.grad)
            part = torch.view_as_real(part) if part.is_complex() else part
            by_copies[copies(parameter), part.device].append(part)
    device = torch.device(over.device if not parameters or over.world_size > 1 else parameters[0].device)
    dtype = torch.float64 if device.type == "cpu" else torch.float32  # the same on ranks without gradients
    total = torch.zeros((), device=device, dtype=dtype)
    for (number, _), parts in by_copies.items():
        norms = torch.stack([norm.to(device, dtype) for norm in torch._foreach_norm(parts, dtype=_precise(parts))])
        total += norms.square().sum() / number
    if over.world_size > 1:
        total = over.unchecked.all_reduce(total, "sum")
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_copies.values():
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm.float()


def _precise(parts: Sequence[torch.Tensor]) -> torch.dtype:
    """Return a dtype in which the norm of 16-bit gradients does not overflow."""
    return torch.float64 if any(part.dtype in (torch.float64, torch.complex128) for part in parts) else torch.float32
