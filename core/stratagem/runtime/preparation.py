"""What a module needs before a strategy wraps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def separate_elements(module: nn.Module) -> None:
    """Give parameters and buffers that were expanded memory for every element: collectives write into them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
