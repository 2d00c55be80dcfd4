"""Logical tensors from shards, and shards from logical tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from stratagem.api import RunContext


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`; a tensor that is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(value: Any, run: RunContext) -> Any:
    """Return a sharded tensor whole, on the CPU, where it is needed; anything else as it is. Collective."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.cpu() if run.needs_values else whole.to("meta")


def shard_like(value: Any, model: Any) -> Any:
    """Return this rank's shard of `value`, in its memory, where `model` is sharded and has its shape; else `value`."""
    if not (isinstance(value, torch.Tensor) and isinstance(model, DTensor) and value.shape == model.shape):
        return value
    sizes, offsets = compute_local_shape_and_global_offset(model.shape, model.device_mesh, model.placements)
    part = value
    for dimension, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if size != value.shape[dimension]:
            part = part.narrow(dimension, min(offset, value.shape[dimension] - size), size)
    # Not by `from_local`, which moves shards that are offloaded to the mesh's device.
    spec = DTensorSpec(model.device_mesh, model.placements, TensorMeta(model.shape, model.stride(), part.dtype))
    return DTensor(part.to(model.to_local().device), spec, requires_grad=False)


def copied(value: Any) -> Any:
    """Return a tensor with memory of its own, since an optimizer keeps what it is given; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value
