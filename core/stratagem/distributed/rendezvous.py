"""The rendezvous of the processes of a run: the port, the store's server, the address."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from attrs import evolve

from stratagem.api.world import World
from stratagem.errors import ConfigError, LaunchError

#: Address for processes of one machine; other machines cannot connect to it.
LOOPBACK = "127.0.0.1"


class RendezvousStore:
    """The store to which launched processes connect. It binds its port at once; its server starts later.

    Start the server once all processes are started: a process that connects earlier waits in the port's queue. The
    server's thread looks up the names of the clients, and a process that is forked meanwhile waits forever for a lock
    of the C library's resolver.
    """

    def __init__(
        self, address: str = LOOPBACK, port: int = 0, *, is_here: bool = True, for_others: bool = False
    ) -> None:
        """Listen on `port`; 0 lets the kernel choose.

        Args:
            is_here: False if another machine hosts the store: there is nothing to do then.
            for_others: listen on all addresses of this machine, for other machines; else on the loopback address.

        Raises:
            LaunchError: the port is taken.
        """
        self.address, self.port = address, port
        self._socket: socket.socket | None = None
        self._store: Any = None
        if is_here:
            self._listen("" if for_others else LOOPBACK)

    def _listen(self, host: str) -> None:
        dual = host == "" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (host, self.port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN
            )
        except OSError as error:
            raise self._cannot_listen(error) from error
        self.port = self._socket.getsockname()[1]

    def serve(self) -> Any:
        """Start the server; return the store.

        Raises:
            LaunchError: the address is not this machine's.
        """
        if self._socket is None:
            return self._store
        import torch.distributed as dist

        options: dict[str, Any] = {
            "is_master": True,
            "wait_for_workers": False,
            "master_listen_fd": self._socket.detach(),
        }
        try:
            self._store = dist.TCPStore(self.address, self.port, **options)
        except dist.DistError as error:
            raise self._cannot_listen(error) from error
        self._socket = None  # the server owns it now
        return self._store

    def close(self) -> None:
        """Release the port. May be called twice."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._store = None

    def _cannot_listen(self, error: Exception) -> LaunchError:
        return LaunchError(
            f"cannot listen on {self.address}:{self.port} ({error})",
            do="choose another MASTER_PORT, or an address of this machine",
        )


def reserve_store(world: World) -> tuple[World, RendezvousStore]:
    """Return the world with the port of the store that its processes connect to, and the store, not started yet.

    Node 0's launcher hosts it, as the returned world states. On one machine it is at the loopback address.

    Raises:
        LaunchError: the port is taken.
    """
    port, several = world.main_port or 0, world.num_nodes > 1
    address = world.main_address if several else LOOPBACK
    store = RendezvousStore(address, port, is_here=world.node_rank == 0, for_others=several)
    return evolve(world, main_address=address, main_port=store.port or world.main_port, store_hosted=True), store


def check_address(world: World, limit_s: float) -> None:
    """Return once this machine can resolve the address of the store.

    Several nodes may start before the name of one is known: each tries again until `limit_s` seconds have passed.

    Raises:
        ConfigError: it cannot.
    """
    deadline = time.monotonic() + (limit_s if world.num_nodes > 1 else 0)
    while error := _resolve(world.main_address, world.main_port, limit_s):
        if time.monotonic() + 1 > deadline:
            raise ConfigError(
                f"MASTER_ADDR is {world.main_address!r}, which this machine cannot resolve ({error})",
                expected="the name or the address of node 0", do="correct it, or export an IP address",
            )  # fmt: skip
        time.sleep(1)


def _resolve(address: str, port: int | None, limit_s: float) -> str:
    """Return why `address` cannot be resolved, or "". Stop waiting for name servers after `limit_s` seconds."""
    errors: list[str] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            errors.append(str(error))

    thread = threading.Thread(target=look_up, daemon=True, name="stratagem-resolve")
    thread.start()
    thread.join(limit_s)
    return f"no answer within {limit_s:g} s" if thread.is_alive() else "".join(errors)
