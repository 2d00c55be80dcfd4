"""The endpoints of a run's ranks: one port each, at which the others probe it.

[Note: probing]
The error of a failed collective does not say which rank is missing. So each rank listens at a port of its own (its
*endpoint*) from the moment the ranks are connected. The kernel answers a probe first: it completes the connection of
a process that hangs or is stopped, refuses that of one that has ended, and nothing comes back from a machine or a
link that is down. A thread of the probed process then answers, to a sender that has the run's token, what the main
thread is doing: in which call, at which line of the user's. A rank that fails probes the nearest endpoints at once,
asks the ranks that answer, and writes a *failure report* into the key-value store. Of the others, those in another call
are at fault; otherwise those without a report, which are gone, hang or are slow, however far away. The finding of the
first rank is stored, and the others raise it instead of their own error. None of this runs while collectives succeed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import astuple, frozen

from stratagem.distributed.call_site import where
from stratagem.distributed.interfaces import address_towards
from stratagem.distributed.rendezvous import LOOPBACK
from stratagem.errors import is_echo

if TYPE_CHECKING:
    from stratagem.api import Collectives, World

#: "gone": the process has ended. "silent": nothing came back from its machine.
Answer = Literal["alive", "gone", "silent"]

#: How long a machine has to answer: twice the time after which the kernel asks again.
PROBE_S = 2.0
#: How many ranks a rank looks at, once after a collective failed, and once more of those that did not report then.
NEAREST = 64
#: How long a rank whose machine answers has to tell what it is doing.
ASK_S = 0.5

_TOKEN = 16
#: The number of the store among ranks.
_STORE = -1

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@frozen
class Peer:
    """Another rank, and where its endpoint is."""

    rank: int
    host: str
    address: str
    #: None: it could not open an endpoint.
    port: int | None
    #: The folder that it opened for the evidence of its machine; "" if it did not.
    evidence: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.address})"


class Endpoints:
    """Those of the other ranks of a run, and this one's; see [Note: probing]."""

    def __init__(self, peers: list[Peer], endpoint: socket.socket | None, world: World, token: bytes = b"") -> None:
        self.peers, self._endpoint, self._world = peers, endpoint, world
        #: Known to the ranks of this run alone.
        self.token = token
        #: What this rank was doing when a collective failed, while it looks for the cause.
        self.failed_in = ""
        if endpoint is not None:
            tell = functools.partial(_tell, weakref.ref(self), endpoint, token)
            threading.Thread(target=tell, daemon=True, name="stratagem-endpoint").start()

    @classmethod
    def exchange(cls, world: World, collectives: Collectives, evidence: str = "") -> Endpoints:
        """Open this rank's endpoint; learn where the others and the folders for their `evidence` are. Collective."""
        endpoint, address = _listen(world)
        port = None if endpoint is None else endpoint.getsockname()[1]
        mine = Peer(world.rank, socket.gethostname(), address, port, evidence)
        everybody = collectives.all_gather_object((astuple(mine), secrets.token_bytes(_TOKEN)))
        peers = [Peer(*each) for each, _ in everybody]
        return cls([peer for peer in peers if peer.rank != world.rank], endpoint, world, everybody[0][1])

    def probe(self, limit_s: float = PROBE_S) -> tuple[dict[int, Answer], bool]:
        """Return how the endpoints of the nearest ranks answer, and whether the store does. Not collective."""
        answers = probe(self._places(self.nearest()) | self._store_place, time.monotonic() + limit_s)
        store = answers.pop(_STORE, "gone")
        return answers, store == "alive"

    def probe_ranks(self, ranks: set[int], limit_s: float = PROBE_S) -> dict[int, Answer]:
        """Return how the endpoint of each of `ranks` answers. Not collective."""
        return probe(self._places(ranks), time.monotonic() + limit_s)

    def store_answers(self, limit_s: float = PROBE_S) -> bool:
        """Return whether the store's port answers: a connection, for which torch's store looks up a name."""
        return probe(self._store_place, time.monotonic() + limit_s).get(_STORE) == "alive"

    def nearest(self, among: set[int] | None = None) -> set[int]:
        """Return the ranks `among` the others, or of all, that this rank looks at: those that come next after it.

        If each of n ranks looked at all of them, n^2 connections would take longer than there is time.
        """
        world = self._world
        ranks = {peer.rank for peer in self.peers} if among is None else among
        return set(sorted(ranks, key=lambda rank: (rank - world.rank) % world.world_size)[:NEAREST])

    def _places(self, ranks: set[int]) -> dict[int, tuple[str, int]]:
        return {
            peer.rank: (peer.address, peer.port) for peer in self.peers if peer.port is not None and peer.rank in ranks
        }

    @property
    def _store_place(self) -> dict[int, tuple[str, int]]:
        port = self._world.main_port
        return {} if port is None else {_STORE: (self._world.main_address, port)}

    def ask(self, ranks: set[int], limit_s: float = ASK_S) -> dict[int, str]:
        """Return what the main threads of `ranks` are doing, for those that tell. Not collective."""
        asked = [peer for peer in self.peers if peer.rank in ranks and peer.port is not None]
        return _ask_all(asked, self.token, time.monotonic() + limit_s)

    def evidence_here(self) -> str:
        """Return the folder for evidence that the first rank of this machine opened; "" if it did not."""
        first = self._world.rank - self._world.local_rank
        return next((peer.evidence for peer in self.peers if peer.rank == first), "")

    def close(self) -> None:
        """Close the endpoint: for others this process is gone."""
        if self._endpoint is not None:
            with contextlib.suppress(OSError):
                self._endpoint.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._endpoint.close()


def _listen(world: World) -> tuple[socket.socket | None, str]:
    """Listen where other ranks can reach this one; return the socket and the address to probe at."""
    try:
        towards = world.main_address if world.num_nodes > 1 else LOOPBACK
        family, address = address_towards(towards, world.main_port or 1)
        here = address
        if world.num_nodes > 1 and world.node_rank == 0 and (address.startswith("127.") or address == "::1"):
            # A name of this machine that leads to itself, as its own name often does. Others are led here, too.
            here, address = "", world.main_address
        endpoint = socket.create_server((here, 0), family=family, backlog=max(128, 2 * world.world_size))
    except OSError:
        return None, "no address"
    _open.add(endpoint)
    return endpoint, address


def _tell(endpoints: weakref.ref[Endpoints], endpoint: socket.socket, token: bytes) -> None:
    """Tell every sender of `token` what the main thread is doing, until the endpoint is closed."""
    while True:
        try:
            client, _ = endpoint.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), client:
            client.settimeout(ASK_S)
            if secrets.compare_digest(client.recv(_TOKEN, socket.MSG_WAITALL), token):
                here, main = endpoints(), threading.main_thread().ident or 0
                raised: Any = sys._current_exceptions().get(main)  # on its way to where `failed_in` is set
                error = raised[1] if isinstance(raised, tuple) else raised  # before Python 3.12
                failed_in = (here and here.failed_in) or (where_raised(error) if error and is_echo(error) else "")
                client.sendall((failed_in or where(sys._current_frames().get(main))).encode())


def where_raised(error: BaseException) -> str:
    """Return in which call `error` was raised, and from which line of the user's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return where(frames[-1] if frames else None)


def _ask_all(peers: list[Peer], token: bytes, deadline: float) -> dict[int, str]:
    told: dict[int, str] = {}
    with contextlib.ExitStack() as opened:
        asked = {}
        for peer in peers:
            with contextlib.suppress(OSError):
                place, left_s = (peer.address, peer.port or 0), max(0.01, deadline - time.monotonic())
                asked[peer.rank] = opened.enter_context(socket.create_connection(place, left_s))
                asked[peer.rank].sendall(token)
        for rank, endpoint in asked.items():
            with contextlib.suppress(OSError):
                endpoint.settimeout(max(0.01, deadline - time.monotonic()))
                if words := b"".join(iter(lambda endpoint=endpoint: endpoint.recv(1 << 12), b"")):  # type: ignore[misc]
                    told[rank] = words.decode(errors="replace")
    return told


def probe(endpoints: Mapping[int, tuple[str, int]], deadline: float) -> dict[int, Answer]:
    """Connect to all `endpoints` at once; return what came back by `deadline`, for those that could be tried."""
    answers: dict[int, Answer] = {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for rank, endpoint in endpoints.items():
            with contextlib.suppress(OSError):  # no such name, or too many files are open
                connection, code = _begin_to_connect(*endpoint)
                opened.enter_context(connection)
                answers[rank] = _answer(code)
                if code == errno.EINPROGRESS:
                    selector.register(connection, selectors.EVENT_WRITE, (rank, connection))
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                rank, connection = key.data
                answers[rank] = _answer(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                selector.unregister(connection)
    return answers


def _begin_to_connect(address: str, port: int) -> tuple[socket.socket, int]:
    """Return a socket, and the code of what became of its connection: EINPROGRESS if that is to be seen."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    return connection, connection.connect_ex(place)


def _answer(code: int) -> Answer:
    return "alive" if code == 0 else "gone" if code == errno.ECONNREFUSED else "silent"


def _close_all() -> None:
    """In a forked child: an endpoint that a copy holds open would answer for a process that has ended."""
    for endpoint in list(_open):
        endpoint.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
