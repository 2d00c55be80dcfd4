"""Logical tensors from shards, and shards from logical tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from stratagem.checkpoint.tensor_memory import as_gathered

if TYPE_CHECKING:
    from stratagem.api import RunContext


#: The `UnitOrder` of each step and hook that runs now, the innermost last.
orders: list[Any] = []


def read(tensor: DTensor) -> torch.Tensor:
    """Return all of `tensor`, for a program that reads it. Collective.

    Raises:
        ConfigError: another rank does something else.
    """
    if orders and not all(placement.is_replicate() for placement in tensor.placements):
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in ("torch", __package__):
            frame = frame.f_back
        orders[-1].next(("place", f"{frame.f_code.co_filename}:{frame.f_lineno}"))
    return tensor.full_tensor()


_handlers: Any = DTensor._op_dispatcher._custom_op_handlers
# ``norm.item()`` and ``float(norm)`` are this rank's part otherwise (pytorch issue 166638).
_handlers[torch.ops.aten._local_scalar_dense.default] = lambda operation, given, _: operation(read(*given))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`; a tensor that is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: DTensor) -> torch.Tensor:
    """Return all of `tensor`. Collective.

    Where FSDP has cut what tensor parallelism had cut along the same dimension, its cut is undone first: torch gathers
    both in one call too, with a warning on every call.
    """
    last = [Replicate() if isinstance(each, _StridedShard) else each for each in tensor.placements]
    return tensor.redistribute(placements=last).full_tensor()


def region(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Return the sizes of this rank's part of `tensor`, and its offsets in the whole.

    torch's own function is wrong for parts of unequal size of which FSDP has cut what was cut before.
    """
    sizes, offsets = list(tensor.shape), [0] * tensor.dim()
    here = tensor.device_mesh.get_coordinate()
    assert here is not None, "this rank has a part"
    cuts = [
        (isinstance(placement, _StridedShard), axis, placement.dim)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    for _, axis, dimension in sorted(cuts):  # FSDP cuts last, whichever axis it is
        size = sizes[dimension]
        each = -(-size // tensor.device_mesh.size(axis))
        first = min(each * here[axis], size)
        sizes[dimension] = min(each, size - first)
        offsets[dimension] += first
    return sizes, offsets


def gathered(value: Any, run: RunContext) -> Any:
    """Return a sharded tensor whole, on the CPU, where it is needed; anything else as it is. Collective."""
    if not isinstance(value, DTensor):
        return value
    values = whole(value)
    return as_gathered(values.cpu(), value.to_local()) if run.needs_values else values.to("meta")


def shard_like(value: Any, model: Any) -> Any:
    """Return this rank's shard of `value`, in its memory, where `model` is sharded and has its shape; else `value`."""
    if not (isinstance(value, torch.Tensor) and isinstance(model, DTensor) and value.shape == model.shape):
        return value
    part = value
    for dimension, (size, offset) in enumerate(zip(*region(model), strict=True)):
        if size != value.shape[dimension]:
            part = part.narrow(dimension, offset, size)
    # Not by `from_local`, which moves shards that are offloaded to the mesh's device.
    spec = DTensorSpec(model.device_mesh, model.placements, TensorMeta(model.shape, model.stride(), part.dtype))
    return DTensor(part.to(model.to_local().device), spec, requires_grad=False)


def copied(value: Any) -> Any:
    """Return a tensor with memory of its own, since an optimizer keeps what it is given; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value
