"""Reserve resources of a Ray cluster for the nodes of a run, or say what is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from attrs import frozen
from ray.util.placement_group import placement_group, remove_placement_group

from stratagem.errors import ConfigError

#: Resources of a cluster that are not shown: everybody has them, or Ray made them up.
_UNSHOWN = ("node:", "memory", "object_store_memory", "accelerator_type:")


@frozen
class Request:
    """What the nodes of a run need."""

    #: Resources of one process, by Ray's names.
    each: dict[str, float]
    processes_per_node: int
    num_nodes: int
    strategy: str

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one node: its processes share a bundle, which Ray never splits over machines."""
        return {name: amount * self.processes_per_node for name, amount in self.each.items()}

    def fits(self, machines: list[Mapping[str, float]]) -> bool:
        """Whether machines with these resources can hold all nodes."""
        counts = [self._nodes_on(machine) for machine in machines]
        if self.strategy == "STRICT_SPREAD":
            return sum(count > 0 for count in counts) >= self.num_nodes
        if self.strategy == "STRICT_PACK":
            return max(counts, default=0) >= self.num_nodes
        return sum(counts) >= self.num_nodes

    def _nodes_on(self, machine: Mapping[str, float]) -> int:
        counts = [machine.get(name, 0.0) / amount for name, amount in self.bundle.items()]
        return int(min(counts, default=self.num_nodes))

    def __str__(self) -> str:
        where = {"STRICT_SPREAD": ", each on another machine", "STRICT_PACK": ", all on one machine"}
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes{where.get(self.strategy, '')}"
        processes = "1 process" if self.processes_per_node == 1 else f"{self.processes_per_node} processes"
        return f"{nodes}, with {_shown(self.bundle)} for the {processes} of a node"


@contextlib.contextmanager
def reserved(request: Request, limit_s: float) -> Iterator[Any]:
    """Reserve the resources of `request` as one placement group, and release them after the block.

    Raises:
        ConfigError: the cluster does not have them; or other jobs used them for `limit_s` seconds.
    """
    if not request.fits([node["Resources"] for node in _alive()]):
        raise _too_few(
            request,
            "has",
            _totals(),
            "start more Ray nodes, or lower devices, num_nodes or the resources of the launcher",
        )
    group = placement_group([request.bundle] * request.num_nodes, strategy=request.strategy)
    try:
        if not group.wait(limit_s):
            raise _too_few(
                request, f"had too little free for {limit_s:g} s, of", _totals(),
                "wait until other jobs end (`ray status` shows them), or raise launcher.ray.placement_timeout",
            )  # fmt: skip
        yield group
    finally:
        remove_placement_group(group)


def _too_few(request: Request, has: str, what: str, do: str) -> ConfigError:
    return ConfigError(f"launcher 'ray' asks for {request}, and the Ray cluster {has} {what}", do=do)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _totals() -> str:
    machines = [f"{node['NodeManagerAddress']} with {_shown(node['Resources'])}" for node in _alive()]
    return f"{len(machines)} machine{'s' if len(machines) != 1 else ''}: {'; '.join(machines)}"


def _shown(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in sorted(resources.items()) if not name.startswith(_UNSHOWN)}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "no CPU or GPU"
