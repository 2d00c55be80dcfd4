"""Autocast inside the engine, for a model with 16-bit parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stratagem_transforms.normalization import match_inputs


class AutocastSteps(nn.Module):
    """Runs the steps of a model with 16-bit parameters under autocast; inputs are not converted.

    It is inside the engine, which disables an autocast around it.
    """

    def __init__(self, step: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.step, self._dtype, self._device_type = step, dtype, device.type
        self._hooks = match_inputs(step) if device.type == "cpu" else []
        # Running statistics are fp32, and torch requires weights of the same dtype.
        self._running = [part for part in step.modules() if isinstance(part, _NormBase) and part.weight is not None]
        for part in self._running:
            part.__dict__["forward"] = functools.partial(_with_wide_weights, part)

    def stop(self) -> None:
        """Restore the layers."""
        for hook in self._hooks:
            hook.remove()
        for part in self._running:
            part.__dict__.pop("forward", None)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype):
            return self.step(*arguments, **options)


def _with_wide_weights(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    wide = {name: value.float() for name, value in layer.named_parameters(recurse=False)}
    layer.__dict__.update(wide)  # found before the parameters of these names
    try:
        result: torch.Tensor = type(layer).forward(layer, x)
        return result
    finally:
        for name in wide:
            del layer.__dict__[name]
