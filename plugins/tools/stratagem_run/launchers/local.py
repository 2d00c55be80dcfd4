"""Plain Python: the script starts its other processes, with the launcher that its Trainer has."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from stratagem_run.devices import check_devices
from stratagem_run.launchers.base import Launcher
from stratagem_run.nodes import Static
from stratagem_run.program import Program, Start
from stratagem_run.resources import Nodes


@frozen(kw_only=True, slots=False)
class Local(Static, Nodes, Launcher):
    """Sets the number of devices and nodes for the Trainer, and WORLD_SIZE, with which the Trainer compares its own."""

    title = "local"

    @classmethod
    def suits(cls, nodes: object, variables: Mapping[str, str]) -> str | None:  # noqa: ARG003
        return "one node; the script starts its processes" if nodes in (None, "1") else None

    def start(self, program: Program, variables: Mapping[str, str]) -> Start:
        nodes = self.nodes or 1
        own: dict[str, object] = {}
        if self.devices is not None:
            check_devices(self.devices, {**variables, **program.variables})
            own |= {"STRATAGEM_TRAINER_DEVICES": self.devices, "WORLD_SIZE": self.devices * nodes}
        if nodes > 1:
            rank, address, port = self.addresses(nodes)
            own |= {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": rank}
            own["STRATAGEM_TRAINER_NUM_NODES"] = nodes
        else:
            self.refuse_addresses("--nodes is 1")
        return Start(program.words, {name: str(value) for name, value in own.items()} | {**program.variables})
