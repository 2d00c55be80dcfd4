"""The key-value store of a run's processes: connect to it as a client, or host it on rank 0."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stratagem.api.group_services import KeyValueStore
from stratagem.distributed.probe import wait_for_store
from stratagem.distributed.rendezvous import LOOPBACK, RendezvousStore
from stratagem.errors import LaunchError

if TYPE_CHECKING:
    from stratagem.api.world import World


_BOARD = "stratagem/board"


class TCPKeyValueStore(KeyValueStore):
    """A key-value store of strings, in the store of the process group."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        self._store.set(f"{_BOARD}/{key}", text)

    def append(self, key: str, text: str) -> None:
        self._store.append(f"{_BOARD}/{key}", text)

    def get(self, key: str) -> str | None:
        name = f"{_BOARD}/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None


#: How often this process has connected, which is the same on all ranks.
_num_connections = 0

#: A connection that `open_store` returned, for the process group that is connected next.
_opened: tuple[tuple[object, ...], Any] | None = None


def open_store(world: World, timeout: timedelta) -> Any:
    """Return this run's store, for all ranks to meet; rank 0 hosts it where no launcher does.

    The connection is kept for the next `connect_store`: a connection costs a name lookup on both sides.

    Raises:
        LaunchError: no store answered within `timeout`, another program listens at its port, or rank 0 cannot host it.
    """
    global _opened
    _opened = _key(world), _connection(world, timeout)
    return _opened[1]


def connect_store(world: World, timeout: timedelta) -> Any:
    """Return this run's store for a process group, connected; each group of a process has its own key prefix in it."""
    if world.main_port is None:
        if world.world_size > 1:
            raise LaunchError(
                f"this process is one of {world.world_size}, and nothing says where they meet",
                expected="processes that a launcher started",
                do="call run.launch(main), or start the script with torchrun",
            )
        return dist.HashStore()
    global _num_connections, _opened
    _num_connections += 1
    opened, _opened = _opened, None
    store = opened[1] if opened is not None and opened[0] == _key(world) else _connection(world, timeout)
    store.set_timeout(timeout)
    # A store that outlives the run still holds the addresses of the last group that connected through it.
    return dist.PrefixStore(f"stratagem/{world.generation}/{_num_connections}", store)


def meet(store: Any, key: str, world_size: int, timeout: timedelta) -> Any:
    """Return `store` once all ranks have come here with the same `key`, which is used once."""
    if store.add(key, 1) == world_size:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timeout)
    return store


def _key(world: World) -> tuple[object, ...]:
    """Return what an opened connection may be used for; a fork must not use its parent's."""
    return os.getpid(), *_store_place(world), world.rank


def _connection(world: World, timeout: timedelta) -> Any:
    if world.rank == 0 and not world.store_hosted:
        return _hosted_store(world)
    place = _store_place(world)
    wait_for_store(world, place, timeout.total_seconds())
    return dist.TCPStore(*place, is_master=False, timeout=timeout)


#: The stores that this process hosts, by address and port.
_hosted: dict[tuple[str, int], Any] = {}


def _store_place(world: World) -> tuple[str, int]:
    """Return the address and port of the store; on one machine the loopback address, unless the launcher hosts it."""
    assert world.main_port is not None, "several processes have the port of a store"
    alone = world.num_nodes == 1 and not world.store_hosted
    return (LOOPBACK if alone else world.main_address), world.main_port


def _hosted_store(world: World) -> Any:
    """Return the store that rank 0 hosts.

    It lives as long as this process: other ranks may connect for the next run before this rank could host a new store
    on the same port.
    """
    place = _store_place(world)
    if not _hosted:
        atexit.register(_hosted.clear)  # registered before `leave_group`, so it runs after it
    if place not in _hosted:
        _hosted[place] = RendezvousStore(*place, for_others=world.num_nodes > 1).serve()
    return _hosted[place].clone()
