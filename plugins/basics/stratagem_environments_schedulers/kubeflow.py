"""Kubeflow: the pods of a PyTorchJob (training-operator) or of a TrainJob (Trainer v2), without torchrun.

A pod is a node. The run starts the processes of its pod, as many as the job's processes per node. RANK of a PyTorchJob
is the rank of the *pod*, while WORLD_SIZE counts processes (pods with older operators); there is no LOCAL_RANK.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, frozen

from stratagem.api import Environment, Evidence, World, hookimpl
from stratagem.distributed.process_variables import launched_world, was_launched
from stratagem.errors import ConfigError
from stratagem_environments_schedulers.variables import check_rank, check_run, count, evidence_in, maybe, seen

if TYPE_CHECKING:
    from stratagem.api import RunContext

_ADDRESS = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
#: Set in every container of Kubernetes.
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_ALL = ("PET_NODE_RANK", "RANK", "PET_NNODES", "WORLD_SIZE", "PET_NPROC_PER_NODE", *_ADDRESS, *_PORT)


@define(eq=False, kw_only=True)
class KubeflowEnvironment(Environment):
    """Pods of a PyTorchJob or a TrainJob that start the script once; the run starts the other processes of its pod."""

    def detect(self) -> Evidence | None:
        rank_name = _rank_name(os.environ)
        if rank_name is None:
            return None
        return evidence_in(os.environ, (rank_name, "PET_NNODES", "WORLD_SIZE"), _missing(os.environ))

    def processes_exist(self) -> bool:
        return was_launched(os.environ)

    def local_processes(self) -> int | None:
        if was_launched(os.environ) or _rank_name(os.environ) is None:
            return None
        return read_pods(os.environ).local_size

    def num_nodes(self) -> int | None:
        if was_launched(os.environ):
            return count(os.environ, "GROUP_WORLD_SIZE", least=1)
        return None if _rank_name(os.environ) is None else read_pods(os.environ).num_nodes

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        if was_launched(os.environ):
            return launched_world(os.environ, run.num_processes)
        pods = read_pods(os.environ)
        check_run(
            run, pods.local_size or run.num_processes, pods.num_nodes,
            (f"the job has {pods.local_size} processes for each pod ({seen(os.environ, _ALL[2:5])})",
             f"{seen(os.environ, ('PET_NNODES', 'WORLD_SIZE'))}: the job has {pods.num_nodes} pods"),
            do=f"set the job's number of processes for each node to {run.num_processes}",
        )  # fmt: skip
        local_size = run.num_processes
        if pods.local_size not in (None, local_size):
            raise ConfigError(
                f"the job has {pods.local_size} processes for each pod ({seen(os.environ, _ALL[2:5])}), and the run "
                f"has {local_size}", expected="the same number", do='leave devices at "auto" and use a strategy with '
                "one process for each device",
            )  # fmt: skip
        return World(
            rank=pods.node_rank * local_size, node_rank=pods.node_rank, world_size=pods.num_nodes * local_size,
            local_world_size=local_size, num_nodes=pods.num_nodes, main_address=pods.address, main_port=pods.port,
        )  # fmt: skip


@frozen(kw_only=True)
class Pods:
    """The pods of a job."""

    node_rank: int
    num_nodes: int
    #: Processes that the job wants in each pod; None: the number of its devices.
    local_size: int | None
    address: str
    port: int


def read_pods(variables: Mapping[str, str]) -> Pods:
    """Read the variables that a controller of Kubeflow sets in this pod.

    Raises:
        ConfigError: some are missing, or they contradict each other.
    """
    rank_name, missing = _rank_name(variables), _missing(variables)
    if rank_name is None or missing:
        raise ConfigError(
            f"{seen(variables, _ALL) or 'no variable of a Kubeflow job is set'}, and {', '.join(missing)} not set",
            expected="PET_NODE_RANK, PET_NNODES, PET_MASTER_ADDR and PET_MASTER_PORT, or RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT, as the controller sets them",
            do='start the script with torchrun, or set environment="local" to train in this pod alone',
        )
    node_rank, num_nodes, local_size = count(variables, rank_name), _num_nodes(variables), None
    if "PET_NPROC_PER_NODE" in variables:
        local_size = maybe(variables, "PET_NPROC_PER_NODE")  # or "auto", "cpu", "gpu": the devices of the pod
    world_size = count(variables, "WORLD_SIZE", least=1) if "WORLD_SIZE" in variables else num_nodes
    if local_size is None and world_size > num_nodes and world_size % num_nodes == 0:
        local_size = world_size // num_nodes
    # Of older operators WORLD_SIZE is the number of pods.
    if world_size not in (num_nodes, num_nodes * (local_size or 1)):
        raise ConfigError(
            seen(variables, ("WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE")),
            expected="WORLD_SIZE to be the number of pods, or of pods times processes",
            do="unset WORLD_SIZE in the job's template: the controller sets it",
        )
    check_rank(node_rank, num_nodes, rank_name, "PET_NNODES" if "PET_NNODES" in variables else "the number of pods")
    if rank_name == "PET_NODE_RANK" and maybe(variables, "RANK") not in (None, node_rank):
        raise ConfigError(
            seen(variables, ("PET_NODE_RANK", "RANK")), expected="the same number, the rank of the pod",
            do="unset RANK in the job's template",
        )  # fmt: skip
    address, port = _first(variables, _ADDRESS), _first(variables, _PORT)
    return Pods(
        node_rank=node_rank, num_nodes=num_nodes, local_size=local_size, address=variables[address],
        port=count(variables, port, least=1),
    )  # fmt: skip


def _num_nodes(variables: Mapping[str, str]) -> int:
    if ":" in variables.get("PET_NNODES", ""):
        raise ConfigError(
            f"PET_NNODES is {variables['PET_NNODES']!r}, so the number of pods may change", expected="one number",
            do="start the script with torchrun, which such an elastic job needs",
        )  # fmt: skip
    if "PET_NNODES" in variables:
        return count(variables, "PET_NNODES", least=1)
    world_size, per_pod = count(variables, "WORLD_SIZE", least=1), maybe(variables, "PET_NPROC_PER_NODE") or 1
    return world_size // per_pod if world_size % per_pod == 0 else world_size


def _rank_name(variables: Mapping[str, str]) -> str | None:
    """Return the variable with the rank of the pod; outside Kubernetes RANK may be that of a process."""
    if "PET_NODE_RANK" in variables:
        return "PET_NODE_RANK"
    return "RANK" if "RANK" in variables and _IN_KUBERNETES in variables and "LOCAL_RANK" not in variables else None


def _missing(variables: Mapping[str, str]) -> list[str]:
    wanted = (("PET_NODE_RANK", "RANK"), ("PET_NNODES", "WORLD_SIZE"), _ADDRESS, _PORT)
    return [" or ".join(names) for names in wanted if not any(name in variables for name in names)]


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(name for name in names if name in variables)
