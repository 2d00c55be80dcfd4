"""Determine rank and world size without a scheduler: from the variables of a launcher, or from torchrun's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

from attrs import define

from stratagem.api import Confidence, Environment, Evidence, World, hookimpl
from stratagem.distributed.process_variables import STORE_HOSTED_VARIABLE, other_devices, was_launched
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class LocalEnvironment(Environment):
    """One machine, or several with MASTER_ADDR, MASTER_PORT and NODE_RANK set on each.

    If LOCAL_RANK is set, all processes of this node exist; otherwise a launcher starts them.
    """

    def detect(self) -> Evidence:
        return local_evidence(os.environ)

    def processes_exist(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        if run.settings.environment in (None, "auto"):  # chosen by name, it needs no check
            check_single_start(os.environ, run.settings.num_nodes, run.num_processes * run.settings.num_nodes)
        _warn_of_one_node(os.environ, run.settings.num_nodes)
        return local_world(os.environ, run.num_processes, run.settings.num_nodes)


#: All that a process needs to know: where each process has these, a run starts no others.
_COMPLETE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: What a node needs to know, where one process of each is started by hand.
_OF_A_NODE = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def local_evidence(variables: Mapping[str, str]) -> Evidence:
    """Return what was set by hand, or that nothing was."""
    if was_launched(variables):  # the same answer as in the process that launched it, which had none of these variables
        several = variables.get("GROUP_WORLD_SIZE", "1") != "1"
        confidence = Confidence.CERTAIN if several else Confidence.FALLBACK
        return Evidence("this program started this process", confidence)
    if all(name in variables for name in _COMPLETE):
        rank, size = _maybe(variables, "RANK"), _maybe(variables, "WORLD_SIZE")
        return Evidence(f"{', '.join(_COMPLETE)} are set", rank=rank, world_size=size)
    if all(name in variables for name in _OF_A_NODE):
        return Evidence(f"{', '.join(_OF_A_NODE)} are set")
    return Evidence("no other environment was found", Confidence.FALLBACK)


#: Programs that start several processes: name, variables with their number, variable with the rank, and the variable
#: that proves that the process is one of them (where the others are also set without it).
_STARTERS = (
    ("SLURM's srun", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_PROCID", "SLURM_STEP_ID"),
    ("Open MPI", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK", None),
    ("MVAPICH", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_RANK", None),
    ("MPI (hydra: MPICH or Intel MPI)", ("PMI_SIZE",), "PMI_RANK", None),
    ("LSF's jsrun", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_RANK", None),
    ("Horovod", ("HOROVOD_SIZE",), "HOROVOD_RANK", None),
    ("a Kubeflow Trainer job", ("PET_NNODES",), "PET_NODE_RANK", None),
    ("a cluster's job (such as a PyTorchJob)", ("WORLD_SIZE",), "RANK", None),
    ("Flux", ("FLUX_JOB_SIZE",), "FLUX_TASK_RANK", None),
    ("PALS (Cray)", (), "PALS_RANKID", None),
    ("PMIx", (), "PMIX_RANK", None),
)


#: Starters that no environment of this project reads.
_UNREAD = ("Flux", "PALS (Cray)", "PMIx")


def _how_to_read(starter: str) -> str:
    if starter in _UNREAD:
        return "install an environment plugin for it"
    if starter == "Horovod":
        return "run `pip install stratagem-horovod`"
    return "let STRATAGEM_PLUGINS and STRATAGEM_DISABLE_PLUGINS allow its environment"


def check_single_start(variables: Mapping[str, str], num_nodes: int, world_size: int | None = None) -> None:
    """Refuse processes that another program started several times without telling each one its rank.

    Each would train a model of its own. Allowed are: all variables of a launch (including LOCAL_RANK) for a world of at
    least as many processes, one of several nodes with its node rank set, a single task, and the script of a batch job,
    which runs once.

    Args:
        world_size: devices x num_nodes; if None, LOCAL_RANK is sufficient.

    Raises:
        ConfigError: names the variables found, and what to install or set.
    """
    has_rank = "LOCAL_RANK" in variables
    if has_rank and (world_size is None or was_launched(variables)):
        return
    if num_nodes > 1 and {"NODE_RANK", "GROUP_RANK"} & set(variables):
        return
    asked = 0 if world_size is None else world_size
    complete = has_rank and (asked > 1 or {"RANK", "WORLD_SIZE"} <= set(variables))
    single = False
    for starter, sizes, rank, evidence in _STARTERS:
        size = next((name for name in sizes if name in variables), None)
        if (evidence or rank) not in variables and (size is None or evidence is not None or rank == "RANK"):
            continue
        if has_rank and rank == "RANK":
            continue  # `local_world` compares them with the run
        seen = [name for name in (evidence, size, rank) if name is not None and name in variables]
        count = None if size is None else variables[size].strip()
        alone = count == "1"
        # A single task of srun may have PMIX_RANK, too.
        if alone or (not sizes and single):
            single = True
            continue
        if complete and not (count is not None and count.isdecimal() and int(count) > asked):
            continue
        what = " and ".join(f"{name} is {variables[name]!r}" for name in seen)
        lacks = f"devices x num_nodes is {world_size}" if has_rank else "LOCAL_RANK is not set"
        raise ConfigError(
            f"{what}, as if {starter} had started this program several times, and {lacks}",
            expected="RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process",
            do=f"{_how_to_read(starter)}, start each process with torchrun, or export those variables; to "
            + (
                "train in one process, unset RANK and WORLD_SIZE"
                if rank == "RANK"
                else 'train a separate model in each process, set environment="local"'
            ),
        )


def _warn_of_one_node(variables: Mapping[str, str], num_nodes: int) -> None:
    """Warn of the variables of one of several nodes in a run of one node, which would train alone."""
    address = variables.get("MASTER_ADDR", "")
    by_hand = "NODE_RANK" in variables and "LOCAL_RANK" not in variables and not was_launched(variables)
    if num_nodes == 1 and by_hand and address not in ("", "localhost", "127.0.0.1", "::1"):
        warnings.warn(
            f"MASTER_ADDR is {address!r} and NODE_RANK is {variables['NODE_RANK']!r}, as on one of several nodes, and "
            "num_nodes is 1: this node trains alone. Pass num_nodes=, or unset NODE_RANK",
            stacklevel=2,
        )


def local_world(variables: Mapping[str, str], local_size: int, num_nodes: int) -> World:
    """Read `variables`; `local_size` and `num_nodes` are the settings of the run."""
    local_rank = _number(variables, "LOCAL_RANK", 0)
    node_rank = _number(variables, "NODE_RANK", _number(variables, "GROUP_RANK", 0))
    world_size = local_size * num_nodes
    if num_nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in variables]
        if "GROUP_RANK" in variables and "NODE_RANK" in missing:
            missing.remove("NODE_RANK")
        if missing:
            raise ConfigError(
                f"num_nodes is {num_nodes} and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
                expected="the address and port of node 0, and the rank of this node, on every node",
                do="export them, or start the nodes with torchrun",
            )
    _check_rank(variables)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"NODE_RANK is {node_rank} and num_nodes is {num_nodes}", expected=f"0 to {num_nodes - 1}")
    if local_rank >= local_size:
        if was_launched(variables):
            raise other_devices(_number(variables, "WORLD_SIZE", None), local_size, num_nodes)
        raise ConfigError(
            f"LOCAL_RANK is {local_rank} and the run has {local_size} processes on this node",
            expected=f"0 to {local_size - 1}",
            do="give every Trainer of a script the devices it was launched with",
        )
    if "LOCAL_RANK" in variables and "MASTER_PORT" not in variables and world_size > 1:
        raise ConfigError(
            f"LOCAL_RANK is set, as if all {world_size} processes existed, and MASTER_PORT is not",
            expected="both, or neither",
            do="unset LOCAL_RANK to start the processes automatically, or set MASTER_ADDR and MASTER_PORT in each",
        )
    found = _number(variables, "WORLD_SIZE", world_size)
    if found != world_size:
        if was_launched(variables):
            raise other_devices(found, local_size, num_nodes)
        raise ConfigError(
            f"WORLD_SIZE is {found} and devices x num_nodes is {local_size} x {num_nodes}",
            expected="the same number",
            do="unset WORLD_SIZE, or change devices or num_nodes",
        )
    rank = node_rank * local_size + local_rank
    if "LOCAL_RANK" in variables and num_nodes == 1 and _number(variables, "RANK", rank) != rank:
        raise ConfigError(
            f"RANK is {variables['RANK']} and LOCAL_RANK is {local_rank} on the only node", expected="the same number",
            do="export the values of this process, or set num_nodes",
        )  # fmt: skip
    return World(
        rank=rank, local_rank=local_rank, node_rank=node_rank, world_size=world_size, local_world_size=local_size,
        num_nodes=num_nodes, main_address=variables.get("MASTER_ADDR", "127.0.0.1"), main_port=_port(variables, None),
        store_hosted=variables.get(STORE_HOSTED_VARIABLE) == "1",
    )  # fmt: skip


@define(eq=False, kw_only=True)
class TorchElasticEnvironment(Environment):
    """Processes started by torchrun, which sets their ranks and restarts them after a failure.

    Variables of a scheduler that started torchrun may be set too: those of torchrun take precedence.
    """

    precedence = 100

    def detect(self) -> Evidence | None:
        run_id = os.environ.get("TORCHELASTIC_RUN_ID")
        if run_id is None:
            return None
        return Evidence(
            f"TORCHELASTIC_RUN_ID is {run_id!r}", rank=_maybe(os.environ, "RANK"),
            world_size=_maybe(os.environ, "WORLD_SIZE"), starters=self._agents(),
        )  # fmt: skip

    def _agents(self) -> int | None:
        # Later starts may have fewer: an agent was lost.
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return _maybe(os.environ, "GROUP_WORLD_SIZE") if first else None

    def local_processes(self) -> int | None:
        return _number(os.environ, "LOCAL_WORLD_SIZE", None)

    def num_nodes(self) -> int | None:
        return _number(os.environ, "GROUP_WORLD_SIZE", None)

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        world = elastic_world(os.environ)
        if run.stack.devices_given and run.num_processes != world.local_world_size:
            raise ConfigError(
                f"devices is {run.num_processes} and torchrun started {world.local_world_size} processes on this node",
                expected="the same number",
                do='leave devices at "auto": torchrun sets it',
            )
        # 1 is the default of num_nodes.
        if run.settings.num_nodes not in (1, world.num_nodes):
            raise ConfigError(
                f"num_nodes is {run.settings.num_nodes} and torchrun has {world.num_nodes}",
                expected="the same number",
                do="leave num_nodes out: torchrun sets it",
            )
        return world


def elastic_world(variables: Mapping[str, str]) -> World:
    """Read torchrun's `variables`.

    Restarted processes must not read the addresses of dead ones from the agent's store, and no variable numbers the
    attempts: agents count restarts separately, and do not count that an agent joins or leaves.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in variables]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set", expected="all variables of torchrun", do="start with torchrun"
        )
    world_size = _number(variables, "WORLD_SIZE", 1)
    _check_rank(variables)
    local_size = _number(variables, "LOCAL_WORLD_SIZE", 1)
    agents_store = variables.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return World(
        rank=_number(variables, "RANK", 0),
        local_rank=_number(variables, "LOCAL_RANK", 0),
        node_rank=_number(variables, "GROUP_RANK", 0),
        world_size=world_size,
        local_world_size=local_size,
        # Nodes may have different numbers of processes, so a division is only the fallback.
        num_nodes=_number(variables, "GROUP_WORLD_SIZE", max(1, world_size // local_size)),
        main_address=variables["MASTER_ADDR"],
        main_port=_port(variables, 29500),
        store_hosted=agents_store,
        generation=None if agents_store else "0",
        may_restart=_number(variables, "TORCHELASTIC_MAX_RESTARTS", 0) > 0,
    )


def _check_rank(variables: Mapping[str, str]) -> None:
    rank, world_size = _number(variables, "RANK", None), _number(variables, "WORLD_SIZE", None)
    if world_size == 0:
        raise ConfigError("WORLD_SIZE is 0", expected="at least 1")
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {world_size}", expected=f"0 to {world_size - 1}")


def _port(variables: Mapping[str, str], default: int | None) -> int | None:
    port = _number(variables, "MASTER_PORT", default)
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(
            f"MASTER_PORT is {port}", expected="a port from 1 to 65535",
            do="export the same free port on every node, or unset it to have one chosen on one machine",
        )  # fmt: skip
    return port


@overload
def _number(variables: Mapping[str, str], name: str, default: int) -> int: ...
@overload
def _number(variables: Mapping[str, str], name: str, default: int | None) -> int | None: ...
def _number(variables: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = variables.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal():
        raise ConfigError(
            f"{name} is {text!r}", expected="a whole number, 0 or more", do="export a number, or unset it"
        )
    return int(text)


def _maybe(variables: Mapping[str, str], name: str) -> int | None:
    """Return the number in variable `name`; None if it has none, for `detect`, which must not raise."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None
