"""Layers of Transformer Engine with the parameters of torch's layers. Imports the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformer_engine import pytorch as engine

#: fp8 matrix products need sizes that are multiples of this.
_MULTIPLE = 16


class Linear(engine.Linear):  # type: ignore[misc]  # it has no types
    """The engine's linear layer whose state is its weight and its bias.

    The engine's own state also has its scales, under ``_extra_state``. They are found again within the first steps, and
    a checkpoint without them can be loaded under any precision.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class LayerNorm(engine.LayerNorm):  # type: ignore[misc]  # it has no types
    """The engine's layer norm whose state is its weight and its bias."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def replace_layers(module: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[int, list[str]]:
    """Replace ``nn.Linear`` and ``nn.LayerNorm`` within `module`; return how many, and words for those that are kept.

    Parameters stay the same objects, so that tied ones stay tied. Subclasses are kept: their forward would be lost.
    """
    made: dict[int, nn.Module] = {}
    kept: list[str] = []
    for path, parent in list(module.named_modules()):
        for name, part in list(parent._modules.items()):
            full = f"{path}.{name}".lstrip(".")
            if part is None or type(part) not in (nn.Linear, nn.LayerNorm):
                continue
            if reason := _unfit(part):
                kept.append(f"{full} ({reason})")
                continue
            if id(part) not in made:
                made[id(part)] = _replacement(part, dtype, device)
            setattr(parent, name, made[id(part)])
    return len(made), kept


def _unfit(part: Any) -> str:
    """Return why `part` cannot be replaced; "" if it can."""
    if isinstance(part, nn.Linear):
        fits = part.in_features % _MULTIPLE == 0 and part.out_features % _MULTIPLE == 0
        return "" if fits else f"{part.in_features} x {part.out_features}, not multiples of {_MULTIPLE}"
    if len(part.normalized_shape) != 1:
        return f"normalizes {len(part.normalized_shape)} dimensions"
    return "" if part.bias is not None else "has no weight or bias"


def _replacement(part: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    new: Any
    if isinstance(part, nn.Linear):
        bias = part.bias is not None
        new = Linear(part.in_features, part.out_features, bias=bias, params_dtype=dtype, device=device)
    else:
        new = LayerNorm(part.normalized_shape[0], eps=part.eps, params_dtype=dtype, device=device)
    new.weight = part.weight
    if part.bias is not None:
        new.bias = part.bias
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, hooks).update(getattr(part, hooks))
    return new.train(part.training)  # type: ignore[no-any-return]
