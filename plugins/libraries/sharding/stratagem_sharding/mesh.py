"""Device meshes over groups that the run made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


def device_mesh(device_type: str, axes: dict[str, int], collectives: Any) -> DeviceMesh:
    """Return a mesh of all ranks whose groups have the run's timeout. Collective.

    For a mesh of several axes, torch would split groups from a communicator that is connected already: gloo's with
    NCCL's options, which gloo does not take, and with a timeout of its own.
    """
    names, sizes = tuple(axes), tuple(axes.values())
    if len(sizes) == 1:
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)
    ranks = torch.arange(math.prod(sizes), dtype=torch.int).view(sizes)
    lines = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(sizes)]
    groups = [collectives.split(each).group for each in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def forget_meshes() -> None:
    """Have torch forget what it keeps about device meshes, whose process groups are about to be destroyed.

    It remembers the results of operations on DTensors by the ranks and names of their mesh: a later run with an equal
    mesh would get tensors on the groups of this one.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator  # torch keeps it private
    propagator.propagate_op_sharding.cache_clear()
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in older versions
    if clear_fast_path is not None:
        clear_fast_path()
