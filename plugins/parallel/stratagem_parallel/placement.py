"""Where each parameter is: which axes of the mesh cut it, and how many ranks hold a copy of the same part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import Mesh

#: The axes along which a replica of the model is spread; ranks on the others hold the same parameters.
MODEL_AXES = ("pipeline", "shard", "expert", "tensor")


def cut_axes(parameter: nn.Parameter) -> set[str]:
    """Return the axes, by the names of `layout.SIZES`, whose ranks hold different parts of `parameter`."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    places = zip(names, parameter.placements, strict=True)
    return {name for name, placement in places if isinstance(placement, Shard | _StridedShard)}


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
