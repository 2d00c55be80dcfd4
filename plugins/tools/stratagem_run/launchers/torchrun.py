"""torchrun: an agent on each node, which starts the processes of the node and restarts them after a failure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_run.devices import check_devices, default_devices
from stratagem_run.launchers.base import Launcher, check_started_once
from stratagem_run.nodes import Static
from stratagem_run.options import cli_option, flag
from stratagem_run.program import Program, Start
from stratagem_run.resources import Extra

#: Set in the pods of a Kubeflow Trainer or a PyTorchJob: torchrun reads what it is not told from PET_ variables.
_POD = "PET_NNODES"

#: Let rank 0 host the store of each attempt. In the agents' own one, a node that joins waits for an address that is
#: published only at the start (torch 2.13), and the job ends.
_JOINING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@frozen(kw_only=True, slots=False)
class Torchrun(Extra, Static, Launcher):
    """Runs torch.distributed.run of this interpreter, so that the program ``torchrun`` need not be on the path."""

    title = "torchrun"

    nodes: str | None = cli_option("machines; for torchrun also MIN:MAX")
    devices: int | None = cli_option("processes on each node, one for each device", validator=at_least(1))
    rdzv_endpoint: str | None = cli_option("a node's name and a port, the same on all nodes", "HOST:PORT")
    rdzv_backend: str | None = cli_option("the store of the rendezvous: c10d (default), or etcd-v2", "NAME")
    rdzv_id: str | None = cli_option("a name for this job, the same on all nodes", "NAME")
    max_restarts: int | None = cli_option("how often failed processes are restarted", validator=at_least(0))

    @classmethod
    def suits(cls, nodes: object, variables: Mapping[str, str]) -> str | None:
        if _POD in variables:
            return f"{_POD} is set, which torchrun reads"
        return None if nodes in (None, "1") else f"--nodes is {nodes}"

    def start(self, program: Program, variables: Mapping[str, str]) -> Start:
        restarts = [] if self.max_restarts is None else [f"--max-restarts={self.max_restarts}"]
        words = program.under("torch.distributed.run")
        at = len(words) - len(program.target) - len(program.arguments)
        words[at:at] = [*self._layout(program, variables), *restarts, *self.option]
        low, high = self._range()
        return Start(words, {**(_JOINING if low != high else {}), **program.variables})

    def _layout(self, program: Program, variables: Mapping[str, str]) -> list[str]:
        check_started_by_no_agent(variables)
        low, high = self._range()
        if _POD in variables and self.nodes is None:
            self._check_unset("the pod's PET_ variables hold the addresses")
            return [] if self.devices is None else [f"--nproc-per-node={self.devices}"]
        devices = default_devices() if self.devices is None else self.devices
        check_devices(devices, {**variables, **program.variables})
        return [*self._nodes(program, low, high), f"--nproc-per-node={devices}"]

    def _nodes(self, program: Program, low: int, high: int) -> list[str]:
        count = f"--nnodes={low}" if low == high else f"--nnodes={low}:{high}"
        if self.rdzv_endpoint is not None:
            self.refuse_addresses("--rdzv-endpoint is set")
            return [
                count, f"--rdzv-backend={self.rdzv_backend or 'c10d'}", f"--rdzv-endpoint={self.rdzv_endpoint}",
                f"--rdzv-id={self.rdzv_id or program.title}",
            ]  # fmt: skip
        if high == 1:
            self._check_unset("--nodes is 1")
            return ["--standalone", count]
        if low != high or self.main_address is None:
            raise ConfigError(
                f"--nodes is {self.nodes} and --rdzv-endpoint is not set", expected="where nodes connect",
                do="on every node pass the same --rdzv-endpoint HOST:PORT, where HOST is one of the nodes"
                + (", or pass --main-address and --node-rank" if low == high else ""),
            )  # fmt: skip
        self._refuse_rendezvous("--main-address is set")
        rank, address, port = self.addresses(high)
        return [count, f"--node-rank={rank}", f"--master-addr={address}", f"--master-port={port}"]

    def _check_unset(self, reason: str) -> None:
        self.refuse_addresses(reason)
        self._refuse_rendezvous(reason)

    def _refuse_rendezvous(self, reason: str) -> None:
        for name in ("rdzv_endpoint", "rdzv_backend", "rdzv_id"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)} is set and {reason}", do=f"leave {flag(name)} out")

    def _range(self) -> tuple[int, int]:
        """Return the least and the largest number of nodes."""
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", self.nodes or "1", re.ASCII)
        if found is None or (found[2] and int(found[2]) < int(found[1])):
            raise ConfigError(
                f"--nodes is {self.nodes!r}", expected="a number of nodes, or MIN:MAX", do="write for example --nodes 2"
            )
        return int(found[1]), int(found[2] or found[1])


def check_started_by_no_agent(variables: Mapping[str, str]) -> None:
    """Refuse an agent in a process of an agent. One agent in each task of srun or mpirun is allowed."""
    elastic = {name: value for name, value in variables.items() if name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE")}
    check_started_once(elastic, "torchrun")
