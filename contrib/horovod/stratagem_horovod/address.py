"""Tell all ranks where rank 0's store is, through the rendezvous server of horovodrun, so that nothing is configured.

Rank 0 writes the address once for each rank, and each rank removes what it read: two programs may run one after the
other under one horovodrun.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from stratagem.api import World
from stratagem.distributed.interfaces import address_towards
from stratagem.distributed.rendezvous import LOOPBACK, RendezvousStore
from stratagem.errors import LaunchError
from stratagem_horovod.variables import SERVER, SERVER_PORT, number

_SCOPE = "stratagem"
#: Seconds that the server may take to answer a request.
_ANSWER_S = 10.0
#: What this process has written or read: it may connect more than once.
_known: dict[tuple[str, int, int], tuple[str, int, Any]] = {}


def with_address(place: World, variables: Mapping[str, str], limit_s: float) -> World:
    """Return `place` with the address and port of a store that rank 0 hosts. All ranks call it.

    Raises:
        ConfigError: a variable is missing or wrong.
        LaunchError: the server cannot be reached, or rank 0 wrote nothing within `limit_s` seconds.
    """
    if SERVER not in variables:
        number(variables, SERVER, least=1)  # raises
    host, port = variables[SERVER], number(variables, SERVER_PORT, least=1)
    if place.world_size == 1:
        return place
    key = (host, port, place.rank)
    if key not in _known:
        _known[key] = _host(place, host, port) if place.rank == 0 else _read(place.rank, host, port, limit_s)
    address, store_port, _ = _known[key]
    return evolve(place, main_address=address, main_port=store_port, store_hosted=True)


def _host(place: World, host: str, port: int) -> tuple[str, int, Any]:
    several = place.num_nodes > 1
    address = address_towards(host, port)[1] if several else LOOPBACK
    listening = RendezvousStore(address, for_others=several)
    store = listening.serve()
    for rank in range(1, place.world_size):
        _request(host, port, "PUT", str(rank), f"{address} {listening.port}".encode())
    return address, listening.port, store


def _read(rank: int, host: str, port: int, limit_s: float) -> tuple[str, int, Any]:
    deadline = time.monotonic() + limit_s
    while not (text := _request(host, port, "GET", str(rank))):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank {rank} waited {limit_s:g} s for rank 0 to tell its address to Horovod's server at {host}:{port}",
                do="check that all ranks run the same program",
            )
        time.sleep(0.05)
    _request(host, port, "DELETE", str(rank))
    address, _, store_port = text.decode().partition(" ")
    return address, int(store_port), None


def _request(host: str, port: int, method: str, key: str, body: bytes | None = None) -> bytes:
    """Return the value of a key; nothing if there is none, or for another method than GET."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)  # no proxy stands between the ranks
    try:
        connection.request(method, f"/{_SCOPE}/{key}", body)
        answer = connection.getresponse()
        content = answer.read()
    except OSError as error:
        raise LaunchError(
            f"Horovod's rendezvous server at {host}:{port} does not answer ({error})",
            expected=f"the server of the horovodrun that started this process, as {SERVER} and {SERVER_PORT} say",
            do="check that horovodrun still runs, and the interfaces given with --network-interfaces",
        ) from error
    finally:
        connection.close()
    return content if answer.status == http.HTTPStatus.OK else b""
