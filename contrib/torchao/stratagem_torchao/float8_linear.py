"""torchao's linear layer in fp8, also under autocast on a CPU. Imports torchao."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear


class AutocastFloat8Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """A linear layer in fp8 whose input is cast as ``nn.Linear`` casts it under autocast.

    torchao's own layer looks only at the autocast of GPUs, and inference mode cannot cast or reshape its tensors.
    """

    #: The recipe, and whether fp8 is emulated.
    made_with: tuple[str, bool]

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002 - the name in nn.Linear
        device = input.device.type
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(device):
                input = input.to(torch.get_autocast_dtype(device))  # noqa: A001
                stack.enter_context(torch.autocast(device, enabled=False))
            return super().forward(input)


def converted(layer: nn.Linear, recipe: str, *, emulate: bool) -> AutocastFloat8Linear:
    """Return a layer with the parameters of `layer` that computes in fp8."""
    plain = nn.Linear(1, 1, bias=False, device="meta")
    plain.in_features, plain.out_features = layer.in_features, layer.out_features
    plain.weight, plain.bias = layer.weight, layer.bias
    config = Float8LinearConfig.from_recipe_name(recipe)
    # A GPU needs a multiple of 16 rows too, which the last batch may not have.
    config = dataclasses.replace(config, emulate=emulate, pad_inner_dim=not emulate)
    new: Any = convert_to_float8_training(plain, config=config)
    new.__class__ = AutocastFloat8Linear
    new.made_with = (recipe, emulate)
    return new  # type: ignore[no-any-return]
