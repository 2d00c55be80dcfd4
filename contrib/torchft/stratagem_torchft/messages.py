"""Flat messages of many tensors, and each rank's own part of sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Bytes of a message: large compared with the cost of its latency.
MESSAGE_BYTES = 25 << 20


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a (sharded) tensor, detached and sharing its memory; complex numbers as real ones."""
    part: Any = tensor
    part = (part.to_local() if hasattr(part, "to_local") else part).detach()
    return torch.view_as_real(part) if part.is_complex() else part


def with_layout_of(values: Tensor, like: Tensor) -> Tensor:
    """Return `values`, which `local` may have returned for it, with the sharding and the dtype of `like`."""
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


def groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of `tensors` that share a message: one dtype, and `MESSAGE_BYTES` or a single larger tensor."""
    waiting: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        dtype = tensor.dtype
        if dtype in waiting and sizes[dtype] + tensor.nbytes > MESSAGE_BYTES:
            yield waiting.pop(dtype)
        if dtype not in waiting:
            waiting[dtype], sizes[dtype] = [], 0
        waiting[dtype].append(name)
        sizes[dtype] += tensor.nbytes
    yield from waiting.values()


def pack(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return copies of `tensors`, concatenated to flat messages; the same on replicas with tensors of equal shapes."""
    return [torch.cat([tensors[name].reshape(-1) for name in names]) for names in groups(tensors)]


def unpack(messages: list[Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of `messages`, which `pack` made of tensors shaped like `tensors`, by name."""
    found: dict[str, Tensor] = {}
    for message, names in zip(messages, groups(tensors), strict=True):
        parts = message.split([tensors[name].numel() for name in names])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return found
