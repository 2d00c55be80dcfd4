"""Device meshes over groups that the run made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stratagem.distributed.default_group import backends_of
from stratagem.errors import ConfigError


def check_backend(device: torch.device) -> None:
    """Refuse shards on a GPU that gloo sends: its gathers take their memory for the CPU's (pytorch issue 152645).

    Raises:
        ConfigError: instead of a process that dies of a segmentation fault.
    """
    if device.type != "cpu" and backends_of(None).get(device.type) == "gloo":
        raise ConfigError(
            f"shards of parameters are on {device}, and the process group's backend there is gloo, which cannot gather "
            "them",
            expected="nccl, or another backend for that device",
            do='drop process_group_backend, or choose strategy="fsdp_cpu_offload" or "ddp"',
        )


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
