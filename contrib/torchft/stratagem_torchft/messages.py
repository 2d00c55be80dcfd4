"""Flat messages of many tensors, and tensors of which a message has this rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stratagem_process_group.messages import group_into_messages


def with_layout_of(values: Tensor, like: Tensor) -> Tensor:
    """Return `values`, which `local_tensor` may have returned for it, with the sharding and the dtype of `like`."""
    values = torch.view_as_complex(values) if like.is_complex() else values
    if not hasattr(like, "to_local"):
        return values
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    return DTensor.from_local(
        values, sharded.device_mesh, sharded.placements, shape=like.shape, stride=like.stride(), run_check=False
    )


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters with `requires_grad` that this rank has, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and not p.is_meta}


def pack(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return copies of `tensors`, concatenated to flat messages; the same on replicas with tensors of equal shapes."""
    return [torch.cat([tensors[name].reshape(-1) for name in names]) for names in group_into_messages(tensors)]


def unpack(messages: list[Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of `messages`, which `pack` made of tensors shaped like `tensors`, by name."""
    found: dict[str, Tensor] = {}
    for message, names in zip(messages, group_into_messages(tensors), strict=True):
        parts = message.split([tensors[name].numel() for name in names])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return found
