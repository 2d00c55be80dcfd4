"""State of a model with quantized layers: as plain weights under their names, or as bitsandbytes names it."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import nn

from stratagem.api.state_fit import check_weights
from stratagem.errors import CheckpointError
from stratagem_bitsandbytes.layers import EightBitLinear, FourBitLinear, quantized_layers

Layers = dict[str, FourBitLinear | EightBitLinear]


def dequantized(module: nn.Module, values: bool = True) -> dict[str, torch.Tensor]:
    """Return the state of `module` with plain weights in fp32; without `values`, these are on the meta device."""
    layers = _frozen(module)
    state = _plain(module.state_dict(), layers)
    for name, layer in layers.items():
        key = f"{name}.weight"
        state[key] = layer.dequantized() if values else torch.empty(layer.logical_shape, device="meta")
    return state


def load(state: dict[str, torch.Tensor], module: nn.Module, strict: bool) -> None:
    """Put `state`, with quantized weights or plain ones, into `module`; plain ones are quantized.

    Raises:
        CheckpointError: names, shapes or kinds of quantization differ.
    """
    layers = _frozen(module)
    logical: dict[str, Any] = {key: value.shape for key, value in _plain(module.state_dict(), layers).items()}
    logical |= {f"{name}.weight": layer.logical_shape for name, layer in layers.items()}
    found = _plain(state, layers)
    pending: list[tuple[Any, tuple[Any, ...]]] = []
    for name, layer in layers.items():
        key = f"{name}.weight"
        if key in found and not found[key].is_floating_point():
            pending.append((layer, _quantized(name, layer, state)))
            found[key] = torch.empty(layer.logical_shape, device="meta")
        elif key in found:
            pending.append((layer, (found[key],)))
    check_weights(logical, found, strict)
    module.load_state_dict({key: value for key, value in found.items() if not _is_weight(key, layers)}, strict=False)
    for layer, parts in pending:
        if len(parts) == 1:
            layer.quantize(parts[0].to(layer.weight.device))
        else:
            layer.put(*parts)


def _frozen(module: nn.Module) -> Layers:
    return {name: layer for name, layer in quantized_layers(module).items() if layer.loads_converted}


def _is_weight(key: str, layers: Layers) -> bool:
    return key.endswith(".weight") and key.removesuffix(".weight") in layers


def _plain(state: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """Return `state` without what belongs to quantized weights."""
    extras = {f"{name}.{extra}" for name in layers for extra in ("SCB", "weight_format")}
    return {
        key: value
        for key, value in state.items()
        if key not in extras and not any(prefix in layers for prefix in _before_weight(key))
    }


def _before_weight(key: str) -> list[str]:
    """Return ``a.b`` for the key ``a.b.weight.absmax``."""
    prefix, found, _ = key.rpartition(".weight.")
    return [prefix] if found else []


def _quantized(name: str, layer: Any, state: dict[str, Any]) -> tuple[Any, Any]:
    """Return the weight of `layer` in `state` and its scales, on its device."""
    weight, device = state[f"{name}.weight"], layer.weight.device
    if isinstance(layer, FourBitLinear):
        prefix = f"{name}.weight."
        parts = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        is_one = weight.dtype is torch.uint8 and any(key.startswith("quant_state.") for key in parts)
        scales = QuantState.from_dict(parts, device=device) if is_one else None
        mine = (layer.quant_type, layer.nested, tuple(layer.logical_shape))
        if scales is not None and (scales.quant_type, scales.nested, tuple(scales.shape)) == mine:
            return weight.to(device), scales
    elif weight.dtype is torch.int8 and f"{name}.SCB" in state and weight.shape == layer.logical_shape:
        return weight.to(device), state[f"{name}.SCB"].to(device)
    raise CheckpointError(
        f"model state '{name}.weight' is of {weight.dtype}, quantized in another way or without its scales",
        expected="plain weights, or those that this precision quantized",
        do='load it under the precision that wrote it, or save it with checkpoint="dequantized"',
    )
