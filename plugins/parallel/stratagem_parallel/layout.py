"""The mesh of a parallel strategy: sizes of its axes, the ranks on them, groups and torch's device mesh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from stratagem.api import Mesh
from stratagem.api.validators import check_equal_nodes
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stratagem.api import Collectives, World

#: Options with sizes, outermost first: neighbouring ranks are on the axis that sends most often.
SIZES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
#: The axis of the run's mesh that an option sets, where the names differ.
AXIS_OF = {"replicate": "data"}


def axis_of(size: str) -> str:
    """Return the axis of the run's mesh whose size is the option `size`."""
    return AXIS_OF.get(size, size)


def make_mesh(given: Mapping[str, int | str | None], world: World, *, across_nodes: bool, name: str) -> Mesh:
    """Return the mesh of `world` for the sizes `given`, of which one may be "auto".

    Args:
        given: each of `SIZES`; None is "auto" for `replicate` if nothing else is.
        across_nodes: whether ranks of one `tensor` axis may be on different nodes.
        name: of the strategy, for messages.

    Raises:
        ConfigError: the product of the sizes is not the world size, or `tensor` is larger than a node.
    """
    if given["tensor"] == "auto" and given["replicate"] is None and world.num_nodes > 1 and not across_nodes:
        given = {**given, "tensor": world.local_world_size}  # and each node has a replica
    automatic = [size for size in SIZES if given[size] == "auto"]
    if not automatic and given["replicate"] is None:
        automatic = ["replicate"]
    if len(automatic) > 1:
        raise ConfigError(
            f"strategy.{name}.{automatic[0]} and strategy.{name}.{automatic[1]} are both 'auto'",
            expected="at most one", do="set the others to numbers",
        )  # fmt: skip
    sizes = {size: 1 if given[size] in ("auto", None) else int(given[size] or 1) for size in SIZES}
    product = math.prod(sizes.values())
    processes = f"{world.world_size} process{'es' * (world.world_size != 1)}"
    shown = " x ".join(f"{size} {sizes[size]}" for size in SIZES if sizes[size] > 1) or "every size 1"
    if automatic and world.world_size % product == 0:
        sizes[automatic[0]] = world.world_size // product
    elif product != world.world_size:
        raise ConfigError(
            f"strategy.{name} has {shown}, and the run has {processes}",
            expected=f"a {'divisor' if automatic else 'product'} of {world.world_size}",
            do="change the sizes, or devices and num_nodes",
        )
    if sizes["tensor"] > 1 and world.num_nodes > 1 and not across_nodes:
        if sizes["tensor"] > world.local_world_size or world.local_world_size % sizes["tensor"]:
            raise ConfigError(
                f"strategy.{name}.tensor is {sizes['tensor']} and a node has {world.local_world_size} processes",
                expected="a divisor of the processes of a node: layers of one model wait for each other often",
                do=f"choose a smaller size, or set strategy.{name}.tensor_across_nodes to True",
            )
        check_equal_nodes(world, f"strategy.{name}.tensor is {sizes['tensor']}", "set tensor_across_nodes to True")
    return Mesh(axes={axis_of(size): sizes[size] for size in SIZES}, rank=world.rank)


class Groups:
    """Collectives and process groups of ranks that differ on some axes; each is made once, by all ranks."""

    def __init__(self, mesh: Mesh, peers: Collectives) -> None:
        self.mesh, self.peers = mesh, peers
        self._made: dict[frozenset[str], Collectives] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run that are on the mesh, in its order."""
        import torch.distributed as dist

        return dist.get_process_group_ranks(self.peers.group) if self.peers.world_size > 1 else [0]

    def over(self, *axes: str) -> Collectives:
        """Return the collectives of the ranks that differ from this one only on `axes`. Collective.

        Ranks are ordered as in the run. Without other ranks on the axes it is the collectives of a single process.
        """
        from stratagem.api import Collectives

        wide = frozenset(axis for axis in axes if self.mesh.size(axis) > 1)
        if not wide:
            return Collectives()
        if wide not in self._made:
            lines = self.mesh.lines(*wide)
            self._made[wide] = self.peers if len(lines) == 1 else self.peers.split(lines)
        return self._made[wide]

    def device_mesh(self, device_type: str) -> Any:
        """Return torch's mesh of the axes with more than one rank, under the names of `SIZES`; None without any."""
        import torch.distributed as dist

        wide = [size for size in SIZES if self.mesh.size(axis_of(size)) > 1]
        if not wide:
            return None
        shape = [self.mesh.size(axis_of(size)) for size in wide]
        ranks = torch.tensor(dist.get_process_group_ranks(self.peers.group), dtype=torch.int).view(shape)
        groups: list[Any] = [self.over(axis_of(size)).group or dist.group.WORLD for size in wide]
        whole: Any = groups[0] if len(groups) == 1 else groups
        return DeviceMesh.from_group(whole, device_type, mesh=ranks, mesh_dim_names=tuple(wide))
