"""Clip gradients of which each rank has a part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stratagem.api import Collectives


def clip_values(gradients: Iterable[Tensor], max_value: float) -> None:
    """Clamp each element of `gradients` to [-max_value, max_value]."""
    each = list(gradients)
    if each:
        torch._foreach_clamp_min_(each, -max_value)
        torch._foreach_clamp_max_(each, max_value)


def clip_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, over: Collectives,
    copies: Callable[[nn.Parameter], int] = lambda _: 1, part: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> Tensor:  # fmt: skip
    """Scale the gradients of `parameters` so that the norm of the whole model's is at most `max_norm`. Collective.

    Args:
        parameters: those of this rank that have gradients.
        over: the ranks that hold the parts of one replica.
        copies: of how many ranks of `over` hold the same part of a parameter, which counts once.
        part: returns what this rank has of a gradient.

    Returns:
        The norm before.
    """
    by_copies: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            own = part(parameter.grad)
            own = torch.view_as_real(own) if own.is_complex() else own
            by_copies[copies(parameter), own.device].append(own)
    device = torch.device(over.device if not parameters or over.world_size > 1 else parameters[0].device)
    dtype = torch.float64 if device.type == "cpu" else torch.float32  # the same on ranks without gradients
    total = torch.zeros((), device=device, dtype=dtype)
    for (number, _), parts in by_copies.items():
        is_wide = any(each.dtype == torch.float64 for each in parts)  # the norm of 16-bit gradients may overflow them
        wide = torch.float64 if is_wide else torch.float32
        norms = torch.stack([norm.to(device, dtype) for norm in torch._foreach_norm(parts, dtype=wide)])
        total += norms.square().sum() / number
    if over.world_size > 1:
        total = over.unchecked.all_reduce(total, "sum")
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_copies.values():
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm.float()
