"""MPI: processes that mpirun or mpiexec started, of Open MPI, MPICH, Intel MPI or MVAPICH.

MPI is used only to start processes and, on several nodes, to tell them where rank 0 is; gradients travel through
torch.distributed. Open MPI sets OMPI_COMM_WORLD_*; MPICH and Intel MPI, whose mpiexec is hydra, set PMI_* and
MPI_LOCAL*. OMPI_COMM_WORLD_NODE_RANK is not the number of a node, but the rank of a process on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, evolve, frozen

from stratagem.api import Environment, Evidence, World, hookimpl
from stratagem.distributed.process_variables import was_launched
from stratagem.errors import ConfigError
from stratagem_environments_schedulers.variables import (
    check_present,
    check_rank,
    check_run,
    count,
    evidence_in,
    main_port,
    maybe,
    own_processes,
    seen,
)

if TYPE_CHECKING:
    from stratagem.api import RunContext


@frozen
class Implementation:
    """The variables of one MPI."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def names(self) -> tuple[str, str, str, str]:
        return self.rank, self.size, self.local_rank, self.local_size


IMPLEMENTATIONS = (
    Implementation(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Implementation(
        "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Implementation("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip


@define(eq=False, kw_only=True)
class MPIEnvironment(Environment):
    """Processes that mpirun or mpiexec started: Open MPI, MPICH, Intel MPI, MVAPICH.

    On one node rank 0 chooses a free port. On several nodes mpi4py tells all ranks the address of rank 0, or you export
    MASTER_ADDR and MASTER_PORT.
    """

    precedence = 80

    def detect(self) -> Evidence | None:
        found = found_implementations(os.environ)
        if not found:
            return None
        first = found[0]
        missing = [name for name in first.names if name not in os.environ]
        names = [name for each in found for name in (each.rank, each.size)]
        return evidence_in(os.environ, names, missing, rank=first.rank, size=first.size)

    def processes_exist(self) -> bool:
        return _several(os.environ) or was_launched(os.environ)

    def local_processes(self) -> int | None:
        return read_local(os.environ).local_world_size if _several(os.environ) else None

    def num_nodes(self) -> int | None:
        return _num_nodes(read_local(os.environ), os.environ) if _several(os.environ) else None

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        if not _several(os.environ):
            check_present(self.detect(), "mpi", "mpirun or mpiexec started", os.environ)
            return own_processes(
                os.environ, run, "mpirun started this program once",
                f"start it with mpirun -np {run.num_processes * run.settings.num_nodes}",
            )  # fmt: skip
        place, implementation = read_local(os.environ), chosen(os.environ)
        size_name = implementation.local_size
        check_run(
            run, place.local_world_size, run.settings.num_nodes, (f"{size_name} is {place.local_world_size}", ""),
            do=f"start {run.num_processes} ranks on each node",
        )  # fmt: skip
        world = _rendezvous(place, implementation, run)
        if run.settings.num_nodes not in (1, world.num_nodes):
            raise ConfigError(
                f"num_nodes is {run.settings.num_nodes} and mpirun started processes on {world.num_nodes} nodes",
                expected="the same number", do="leave num_nodes out: mpirun sets it",
            )  # fmt: skip
        return world


# --- The variables -----------------------------------------------------------------------------------------------


def found_implementations(variables: Mapping[str, str]) -> list[Implementation]:
    """Return those whose rank or size is set, complete ones first."""
    found = [each for each in IMPLEMENTATIONS if each.rank in variables or each.size in variables]
    return sorted(found, key=lambda each: any(name not in variables for name in each.names))


def chosen(variables: Mapping[str, str]) -> Implementation:
    """Return the MPI whose variables are set.

    Raises:
        ConfigError: some of them are missing, or those of two are set and contradict each other.
    """
    found = found_implementations(variables)
    if not found:
        raise ConfigError(
            "none of OMPI_COMM_WORLD_RANK, PMI_RANK and MV2_COMM_WORLD_RANK is set", expected="a process of mpirun",
            do="start the program with mpirun or mpiexec",
        )  # fmt: skip
    first, *others = found
    missing = [name for name in first.names if name not in variables]
    if missing:
        raise ConfigError(
            f"{seen(variables, first.names)}, and these are not set: {' and '.join(missing)}",
            expected=f"all variables that {first.name} sets",
            do="start the program with mpirun or mpiexec, or export RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
            'MASTER_PORT in each process and set environment="local"',
        )
    for other in others:
        pairs = ((first.rank, other.rank), (first.size, other.size))
        if any(b in variables and variables[a] != variables[b] for a, b in pairs):
            raise ConfigError(
                f"{seen(variables, (first.rank, first.size))}, and {seen(variables, (other.rank, other.size))}",
                expected=f"variables of {first.name} or of {other.name}, or equal ones",
                do="unset those of the MPI that did not start this process",
            )
    return first


def read_local(variables: Mapping[str, str]) -> World:
    """Return the ranks and counts of this process; not yet where rank 0 is, nor the number of nodes."""
    found = chosen(variables)
    rank, local_rank = count(variables, found.rank), count(variables, found.local_rank)
    size, local_size = count(variables, found.size, least=1), count(variables, found.local_size, least=1)
    check_rank(rank, size, found.rank, found.size)
    check_rank(local_rank, local_size, found.local_rank, found.local_size)
    if local_size > size:
        raise ConfigError(
            f"{found.local_size} is {local_size} and {found.size} is {size}", expected=f"at most {size} on a node",
            do="unset the variables that were inherited from another mpirun",
        )  # fmt: skip
    return World(rank=rank, local_rank=local_rank, world_size=size, local_world_size=local_size)


def _several(variables: Mapping[str, str]) -> bool:
    """Whether mpirun started several processes; the only one starts others itself."""
    return bool(found_implementations(variables)) and maybe(variables, chosen(variables).size) != 1


def _num_nodes(place: World, variables: Mapping[str, str]) -> int:
    """Return the number of nodes; a guess where nodes have different numbers of ranks, and MPI does not tell it."""
    if place.local_world_size == place.world_size:
        return 1
    told = maybe(variables, "OMPI_MCA_orte_num_nodes") or 0
    return told if told > 1 else -(-place.world_size // place.local_world_size)


# --- Where rank 0 is ---------------------------------------------------------------------------------------------


def _rendezvous(place: World, implementation: Implementation, run: RunContext) -> World:
    """Return `place` with the address and port of the store, and the nodes."""
    exported = os.environ.get("MASTER_ADDR")
    port = main_port(os.environ, 0) or None
    if place.local_world_size == place.world_size:
        if port is not None:
            return evolve(place, main_port=port)
        from stratagem_environments_schedulers.one_node import share_port

        return share_port(place, implementation.rank, run.stack.timeouts().start.total_seconds())
    if exported and port:
        return evolve(_numbered_nodes(place, implementation), main_address=exported, main_port=port)
    from stratagem_environments_schedulers.over_mpi import ask_mpi

    return ask_mpi(place, seen(os.environ, implementation.names), exported, port)


def _numbered_nodes(place: World, implementation: Implementation) -> World:
    """Return `place` with the number of its node, where that follows from the ranks.

    Raises:
        ConfigError: it does not.
    """
    node_rank, num_nodes = maybe(os.environ, "NODE_RANK"), _num_nodes(place, os.environ)
    if node_rank is None:
        blocks = place.rank % place.local_world_size == place.local_rank
        in_turn = place.rank // num_nodes == place.local_rank
        even = place.world_size == num_nodes * place.local_world_size
        if not even or not (blocks or in_turn):
            raise ConfigError(
                f"{seen(os.environ, implementation.names)}, from which the number of this node does not follow",
                expected="as many ranks on each node, or NODE_RANK on each",
                do="run `pip install mpi4py`, and unset MASTER_PORT",
            )
        node_rank = place.rank // place.local_world_size if blocks else place.rank % num_nodes
    return evolve(place, node_rank=node_rank, num_nodes=max(num_nodes, node_rank + 1))
