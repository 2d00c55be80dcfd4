"""Normalizing layers whose weights have 16 bits, on a CPU: autocast leaves it to the caller to give them the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def match_inputs(module: nn.Module) -> list[RemovableHandle]:
    """Cast what normalizing layers in `module` get to the dtype of their weights; return the hooks, to be removed."""
    return [
        part.register_forward_pre_hook(_cast_to_weight)
        for part in module.modules()
        if isinstance(part, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) and part.weight is not None
    ]


def _cast_to_weight(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = arguments
    return (x.to(layer.weight.dtype), *rest)
