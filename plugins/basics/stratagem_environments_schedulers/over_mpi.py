"""Ask MPI, through mpi4py, where rank 0 is and which ranks share a node. For several nodes."""

from __future__ import annotations

import socket
from typing import Any

from attrs import evolve

from stratagem.api import World
from stratagem.errors import ConfigError

#: The answer of an earlier call in this process, with the store that rank 0 hosts.
_answers: list[tuple[World, Any]] = []

#: An address that no machine has (RFC 5737): packets to it would take the default route.
_ELSEWHERE = "192.0.2.1"


def ask_mpi(place: World, found: str, address: str | None, port: int | None) -> World:
    """Return `place` with the nodes, and with the address and port of a store that rank 0 hosts. Collective.

    Args:
        place: the ranks and counts of this process.
        found: the variables that tell them, for messages.
        address: MASTER_ADDR, if the user exported it.
        port: MASTER_PORT, if the user exported it.

    Raises:
        ConfigError: mpi4py is not installed, or uses another MPI.
    """
    if not _answers:
        _answers.append(_ask(place, found, address, port))
    return _answers[0][0]


def _ask(place: World, found: str, address: str | None, port: int | None) -> tuple[World, Any]:
    world = _comm_world(place, found)
    store: Any = None
    if place.rank == 0:
        address = address or _outward_address()
        port, store = _serve(address, port)
    address, port = world.bcast((address, port))
    assert address is not None, "rank 0 sent it"
    hosts = world.allgather(socket.gethostname())
    nodes, here = list(dict.fromkeys(hosts)), hosts[place.rank]
    if hosts.count(here) != place.local_world_size:
        raise ConfigError(
            f"{found}, and {hosts.count(here)} ranks have the host name {here!r}", expected="the same number",
            do="give each node a host name of its own, or export MASTER_ADDR, MASTER_PORT and NODE_RANK",
        )  # fmt: skip
    numbered = evolve(place, node_rank=nodes.index(here), num_nodes=len(nodes))
    return evolve(numbered, main_address=address, main_port=port, store_hosted=True), store


def _serve(address: str, port: int | None) -> tuple[int, Any]:
    from stratagem.distributed.rendezvous import RendezvousStore

    listening = RendezvousStore(address, port or 0, for_others=True)
    return listening.port, listening.serve()


def _comm_world(place: World, found: str) -> Any:
    """Return MPI's communicator of all ranks; importing mpi4py initializes MPI."""
    export = "export MASTER_ADDR and MASTER_PORT, the same in each process (mpirun -x MASTER_ADDR, or mpiexec -genv)"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{found}, so there are several nodes, and mpi4py cannot be imported ({error})",
            expected="it, to tell all ranks where rank 0 is", do=f"run `pip install mpi4py`, or {export}",
        ) from error  # fmt: skip
    if MPI.COMM_WORLD.Get_size() != place.world_size:
        library = MPI.Get_library_version().partition(",")[0].split("\n")[0].strip("\0 ")
        raise ConfigError(
            f"{found}, and mpi4py, which uses {library}, has a world of {MPI.COMM_WORLD.Get_size()}",
            expected="mpi4py for the MPI whose mpiexec started this process",
            do=f"run `pip install --no-binary mpi4py mpi4py` with that MPI's mpicc, or {export}",
        )
    return MPI.COMM_WORLD


def _outward_address() -> str:
    """Return the address of this machine on its default route; its host name where there is none."""
    from stratagem.distributed.interfaces import address_towards

    try:
        address = address_towards(_ELSEWHERE, 1)[1]
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if address.startswith("127.") else address
