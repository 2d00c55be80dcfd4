"""The rendezvous of the processes of a run: the port, the store's server, the address; what they tell each other there.

[Note: meeting]
Each process appends its *arrival*, a mapping, to a list in the store. Rank 0 reads the list in order, compares, and
writes the *verdict* once: either an error for all ranks, or that they agree and how many arrivals were read. A process
whose arrival has a higher number than that is not one of the ranks: another process came in its place, or the store
belongs to another run. A process that fails before it arrives appends its error instead.
Nothing here waits for another rank: callers of this poll, so that they can say what they wait for, and stop at a
signal.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from attrs import evolve

from stratagem.api.world import World
from stratagem.distributed.probe import Notices, ask, notify
from stratagem.errors import ConfigError, LaunchError

#: Address for processes of one machine; other machines cannot connect to it.
LOOPBACK = "127.0.0.1"

#: How long a connection of this process to its own store may take, and a look at a store that has taken the port.
_OWN_S = 3.0

#: Key under which a store tells which process hosts it.
_HOST_KEY = "stratagem/host"


class PortTakenError(LaunchError):
    """Another program listens at the port, such as another run on this machine."""


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
            PortTakenError: the port is taken.
        """
        self.address, self.port, self._for_others = address, port, for_others
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

        is_ours = not self._for_others or _is_here(self.address)
        options: dict[str, Any] = {
            "is_master": True,
            "wait_for_workers": False,
            "master_listen_fd": self._socket.detach(),
            "multi_tenant": True,  # a strategy that connects in torch's own way (env://) uses the same server
        }
        try:
            self._store = dist.TCPStore(self.address if is_ours else LOOPBACK, self.port, **options)
        except dist.DistError as error:
            raise self._cannot_listen(error) from error
        self._socket = None  # the server owns it now
        self._store.set(_HOST_KEY, f"process {os.getpid()} on {socket.gethostname()}")
        if not is_ours:
            self._check_address_leads_here()
        return self._store

    def close(self) -> None:
        """Release the port. May be called twice."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._store = None

    def _check_address_leads_here(self) -> None:
        """Refuse an address at which this store cannot be reached; an address of a gateway in front of it is fine."""
        import torch.distributed as dist

        key, theirs = f"stratagem/self/{os.urandom(8).hex()}", None
        self._store.set(key, "")
        if ask(self.address, self.port, _OWN_S).kind == "store":
            with contextlib.suppress(dist.DistError):
                theirs = dist.TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=_OWN_S))
                if theirs.check([key]):
                    return
        self.close()
        here = f"process {os.getpid()} on {socket.gethostname()}"
        found = f"{here} is to host the store, as node 0, at MASTER_ADDR {self.address!r}, which is another machine"
        if theirs is not None:
            Meeting(theirs, generation="0", number=1).fail(found)
        raise LaunchError(
            found, expected="an address of node 0",
            do="set MASTER_ADDR to the address of node 0 on every node, and NODE_RANK (or RANK) to a number of its own",
        )  # fmt: skip

    def _cannot_listen(self, error: Exception) -> LaunchError:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = os.strerror(errno.EADDRINUSE).lower() if taken else str(error)
        holder = _holder(self.port) if taken else ""
        return (PortTakenError if taken else LaunchError)(
            f"cannot listen on {self.address}:{self.port} ({reason}{holder})",
            do="choose another MASTER_PORT, or an address of this machine",
        )


def _holder(port: int) -> str:
    """Return which run has taken the port, if it is a run."""
    if ask(LOOPBACK, port, _OWN_S).kind != "store":
        return ""
    import torch.distributed as dist

    with contextlib.suppress(dist.DistError):
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=_OWN_S))
        if store.check([_HOST_KEY]):
            return f": it is the port of another run, whose store {store.get(_HOST_KEY).decode()} hosts"
    return ""


def _is_here(address: str) -> bool:
    """Whether `address` is one of this machine's."""
    for family, kind, protocol, _, (host, *rest) in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as candidate:
            candidate.bind((host, 0, *rest[1:]))
            return True
    return False


def reserve_store(world: World) -> tuple[World, RendezvousStore]:
    """Return the world with the port of the store that its processes connect to, and the store, not started yet.

    Node 0's launcher hosts it, as the returned world states. On one machine it is at the loopback address.

    Raises:
        PortTakenError: the port is taken.
    """
    port, several = world.main_port or 0, world.num_nodes > 1
    address = world.main_address if several else LOOPBACK
    store = RendezvousStore(address, port, is_here=world.node_rank == 0, for_others=several)
    return evolve(world, main_address=address, main_port=store.port or world.main_port, store_hosted=True), store


def check_address(world: World, limit_s: float) -> None:
    """Return once this machine can resolve the address of the store; after some seconds of waiting, say for what.

    Several nodes may start before the name of one is known: each tries again until `limit_s` seconds have passed.

    Raises:
        ConfigError: it cannot, or the address is none.
    """
    _check_form(world.main_address)
    notices, tries_s = Notices(), limit_s if world.num_nodes > 1 else 0
    while error := _resolve(world.main_address, world.main_port, limit_s):
        found = f"MASTER_ADDR is {world.main_address!r}, which this machine cannot resolve ({error})"
        if notices.waited_s + 1 > tries_s:
            raise ConfigError(
                found, expected="the name or the address of node 0", do="correct it, or export an IP address"
            )
        if notices.due() and world.local_rank == 0:
            notify(f"rank {world.rank} of {world.world_size} waits: {found}; it tries again for {limit_s:g} s in all")
        time.sleep(1)


def _check_form(address: str) -> None:
    """Refuse what no name server will ever know, such as an address with a port."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.partition("%")[0])
        return
    if not address or ":" in address or any(character.isspace() for character in address):
        raise ConfigError(
            f"MASTER_ADDR is {address!r}", expected="the name or the address of node 0, without a port",
            do="export the same address on every node, and its port as MASTER_PORT",
        )  # fmt: skip


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


# --- The meeting -------------------------------------------------------------------------------------------------


class Meeting:
    """One meeting of the ranks of a run; see [Note: meeting]."""

    def __init__(self, store: Any, generation: str, number: int) -> None:
        """Use `store`.

        Args:
            generation: `World.generation`.
            number: counts the meetings of a process; the same on all ranks.
        """
        import torch.distributed as dist

        self._store = dist.PrefixStore(f"stratagem/meeting/{generation}/{number}", store)

    def fail(self, sentence: str) -> None:
        """Append the error of a process that does not arrive, or that leaves before the verdict."""
        self.arrive({"failed": sentence})
        self.acknowledge()  # it reads no verdict

    def arrive(self, arrival: Mapping[str, Any], facts: str = "") -> int:
        """Append an arrival; return its number, from 1."""
        number: int = self._store.add("arrivals", 1)
        self._store.set(f"facts/{number}", facts)
        self._store.set(f"arrival/{number}", json.dumps(dict(arrival)))
        return number

    def arrival(self, number: int) -> dict[str, Any] | None:
        """Return the arrival with this number, None if there is none yet."""
        return self._read(f"arrival/{number}")

    def facts(self, number: int) -> str:
        """Return the facts that were passed with an arrival."""
        return str(self._store.get(f"facts/{number}").decode())

    def conclude(self, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Write the verdict, unless there is one; return the one that holds."""
        holds: dict[str, Any] = json.loads(self._store.compare_set("verdict", "", json.dumps(dict(verdict))))
        return holds

    def verdict(self) -> dict[str, Any] | None:
        """Return the verdict, None if there is none yet."""
        return self._read("verdict")

    def acknowledge(self) -> None:
        """Tell that this process has read the verdict."""
        self._store.add("acknowledged", 1)

    def wait_for_readers(self, world_size: int, limit_s: float) -> None:
        """Return once all processes have read the verdict that have arrived or are missing; wait `limit_s` at most."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._store.add("acknowledged", 0) >= max(world_size, self._store.add("arrivals", 0)):
                return
            time.sleep(0.01)

    def _read(self, key: str) -> dict[str, Any] | None:
        if not self._store.check([key]):
            return None
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found
