"""The gradients of a step in one tensor, which is what peers average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigError


def check_trained(module: nn.Module | None, averaged: Sequence[Tensor]) -> None:
    """Refuse a parameter that became trainable after the peers agreed on which gradients they average."""
    assert module is not None, "set before wrap_model"
    known = set(map(id, averaged))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ConfigError(
                f"{name!r} was frozen when training began and is trained now, and the other peers do not expect it",
                expected="the same trainable parameters during the whole fit",
                do="begin with it trainable, or train in two fits",
            )


def flat_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """Return the gradients, and for each parameter whether it has one: (sum of sizes + parameters,)."""
    flags = [0.0 if each.grad is None else 1.0 for each in parameters]
    parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    flat = torch.cat([*(part.flatten() for part in parts), torch.tensor(flags, device=parts[0].device)])
    return flat if flat.dtype == torch.float64 else flat.float()


def flat_buffer(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an empty tensor of the shape and dtype of `flat_gradients`."""
    sizes = sum(each.numel() for each in parameters) + len(parameters)
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
    return torch.empty(sizes, dtype=dtype, device=device)


def set_gradients(parameters: Sequence[Tensor], flat: Tensor) -> None:
    """Set the gradients from `flat`; a parameter that no peer had a gradient for keeps its own."""
    *parts, flags = flat.split([*(each.numel() for each in parameters), len(parameters)])
    for parameter, part, flag in zip(parameters, parts, flags.tolist(), strict=True):
        if flag > 0:
            parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)
