"""Normalization layers with 16-bit weights on the CPU, where autocast does not cast their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def match_inputs(module: nn.Module) -> list[RemovableHandle]:
    """Add hooks that cast inputs of normalization layers to the dtype of their weights; return the hooks' handles."""
    return [
        part.register_forward_pre_hook(_cast_to_weight)
        for part in module.modules()
        if isinstance(part, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) and part.weight is not None
    ]


def _cast_to_weight(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = arguments
    return (x.to(layer.weight.dtype), *rest)
