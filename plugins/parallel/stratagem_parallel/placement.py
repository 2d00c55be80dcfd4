"""Where each parameter is: which axes of the mesh cut it, and how many ranks hold a copy of the same part."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stratagem.errors import ConfigError
from stratagem_sharding.shards import local

if TYPE_CHECKING:
    from stratagem.api import Collectives, Mesh

#: The axes along which a replica of the model is spread; ranks on the others hold the same parameters.
MODEL_AXES = ("pipeline", "shard", "expert", "tensor")


def cut_axes(parameter: nn.Parameter) -> set[str]:
    """Return the axes, by the names of `layout.SIZES`, whose ranks hold different parts of `parameter`."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    return {name for name, placement in zip(names, parameter.placements, strict=True) if _cuts(placement)}


def _cuts(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


def copies(parameter: nn.Parameter, mesh: Mesh, stages: int = 1) -> int:
    """Return how many of the ranks that share a replica hold the same part of `parameter`.

    Args:
        stages: of a pipeline, that hold `parameter`: more than one if it is tied.
    """
    cut = cut_axes(parameter)
    return stages * math.prod(mesh.size(axis) for axis in MODEL_AXES[1:] if axis not in cut)


def check_no_hooks(parameter: nn.Parameter, name: str, axis: str) -> None:
    """Refuse to replace a `parameter` by its part where it has hooks on its gradient, which are of the whole."""
    if isinstance(parameter, DTensor):
        return  # it is cut already: the hooks are of the part
    hooks: list[Any] = [
        *(parameter._backward_hooks or {}).values(),
        *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),
    ]
    if hooks:
        called = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ConfigError(
            f"{name}, which strategy.parallel.{axis} cuts, has a hook on its gradient ({called})",
            expected="parameters without hooks: a rank has a part of the gradient only",
            do="change gradients in on_before_optimizer_step, or leave the layer out of the plan",
        )


def clip_norm(
    parameters: Sequence[nn.Parameter], copies: Callable[[nn.Parameter], int], over: Collectives, max_norm: float
) -> torch.Tensor:
    """Scale the gradients of `parameters` so that the norm of the whole model's is at most `max_norm`. Collective.

    Args:
        parameters: those of this rank that have gradients.
        copies: of how many ranks of `over` hold the same part of a parameter, which counts once.
        over: the ranks that hold the parts of one replica.

    Returns:
        The norm before.
    """
    by_copies: dict[tuple[int, torch.device], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            part = local(parameter.grad)
            part = torch.view_as_real(part) if part.is_complex() else part
            by_copies[copies(parameter), part.device].append(part)
    device = torch.device(over.device if not parameters or over.world_size > 1 else parameters[0].device)
    dtype = torch.float64 if device.type == "cpu" else torch.float32  # the same on ranks without gradients
    total = torch.zeros((), device=device, dtype=dtype)
    for (number, _), parts in by_copies.items():
        is_wide = any(part.dtype == torch.float64 for part in parts)  # the norm of 16-bit gradients may overflow them
        wide = torch.float64 if is_wide else torch.float32
        norms = torch.stack([norm.to(device, dtype) for norm in torch._foreach_norm(parts, dtype=wide)])
        total += norms.square().sum() / number
    if over.world_size > 1:
        total = over.unchecked.all_reduce(total, "sum")
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_copies.values():
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm.float()
