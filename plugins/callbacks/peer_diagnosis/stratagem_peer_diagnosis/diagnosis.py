"""Peer diagnostics: after a failed collective, probe every rank to tell which one died, is unreachable, or hangs.

[Note: probing]
The error of a failed collective does not say which rank is missing. So each rank listens at a port of its own (its
*endpoint*) from the moment the ranks are connected. The kernel answers a probe first: it completes the connection of
a process that hangs or is stopped, refuses that of one that has ended, and nothing comes back from a machine or a
link that is down. A thread of the probed process then answers, to a sender that has the run's token, what the main
thread is doing: in which call, at which line of the user's. A rank that fails probes all endpoints at once, asks the
ranks that answer, and writes a *failure report* into the key-value store. Of the others, those in another call are at
fault; otherwise those without a report, which hang or are slow. The finding of the first rank is stored, and the
others raise it instead of their own error. None of this runs while collectives succeed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import frozen

from stratagem.api.peer_errors import is_echo
from stratagem.distributed.call_site import where
from stratagem.distributed.interfaces import address_towards
from stratagem.distributed.rendezvous import LOOPBACK
from stratagem.errors import PeerError

if TYPE_CHECKING:
    from datetime import timedelta

    from stratagem.api.world import Collectives, World


Answer = Literal["alive", "gone", "silent"]

#: How long a machine has to answer: twice the time after which the kernel asks again.
PROBE_S = 2.0
#: How long a rank whose machine answers has to say what it is doing.
ASK_S = 0.5
#: How long ranks wait for each other's reports. A rank that hosts the store stays so long, for others to look.
REPORT_S = 1.0
#: How long a rank that only lost a connection waits for the note of one that knows more.
NOTE_S = 2.0
#: How long to wait for a note that should be there already, and how long the store may take: its host may be cut off.
AT_ONCE_S = 0.05
STORE_S = 1.0

_TIMED_OUT = re.compile(
    r"timed out (waiting|in blocking)|application timeout|timed? ?out after|operation timeout|before timing out",
    re.IGNORECASE,
)
#: NCCL tells the timeout in its description of the call, and then how long the call took.
_MILLISECONDS = re.compile(r"Timeout\(ms\)=(\d+)|(\d+) ?(?:ms|milliseconds)\b")
#: So many ranks are named in a sentence; of more, the number is told.
_NAMED = 4

#: Mark of an error that has been through `explained`: calls of a run may be nested.
_SETTLED = "_settled_by_stratagem"

_endpoints: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@frozen
class Peer:
    """Another rank, and where its endpoint is."""

    rank: int
    host: str
    address: str
    #: None: it could not open an endpoint.
    port: int | None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.address})"


class Neighbours:
    """The other ranks of a run, and this one's endpoint; see [Note: probing]."""

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
    def meet(cls, world: World, collectives: Collectives) -> Neighbours:
        """Open this rank's endpoint and learn where the others are. Collective."""
        endpoint, address = _open_endpoint(world)
        port = None if endpoint is None else endpoint.getsockname()[1]
        mine = Peer(world.rank, socket.gethostname(), address, port)
        everybody = collectives.all_gather_object((mine.rank, mine.host, address, port, secrets.token_bytes(_TOKEN)))
        peers = [Peer(*each[:4]) for each in everybody]
        return cls([peer for peer in peers if peer.rank != world.rank], endpoint, world, everybody[0][-1])

    def probe(self, limit_s: float = PROBE_S, ranks: set[int] | None = None) -> tuple[dict[int, Answer], bool]:
        """Return how the endpoint of each rank (of `ranks`) answers, and whether the store does. Not collective."""
        endpoints: dict[int, tuple[str, int]] = {
            p.rank: (p.address, p.port) for p in self.peers if p.port is not None and (ranks is None or p.rank in ranks)
        }
        if self._world.main_port is not None:
            endpoints[-1] = (self._world.main_address, self._world.main_port)
        answers = _probe(endpoints, time.monotonic() + limit_s)
        store = answers.pop(-1, "gone")
        return answers, store == "alive"

    def ask(self, ranks: set[int], limit_s: float = ASK_S) -> dict[int, str]:
        """Return what the main threads of `ranks` are doing, for those that tell. Not collective."""
        asked = [peer for peer in self.peers if peer.rank in ranks and peer.port is not None]
        return _ask_all(asked, self.token, time.monotonic() + limit_s)

    def close(self) -> None:
        """Close the endpoint: for others this process is gone."""
        if self._endpoint is not None:
            with contextlib.suppress(OSError):
                self._endpoint.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._endpoint.close()


class Diagnosed(Protocol):
    """What the diagnosis reads of a run."""

    neighbours: Neighbours | None
    watchdog: Any
    collectives: Collectives

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def join_timeout(self) -> timedelta: ...


def explained(error: BaseException, run: Diagnosed) -> BaseException:
    """Return the error to raise in place of `error`: what is known of its cause, if another rank's end is what it tells
    of. The others learn what this rank ended with.
    """
    if run.watchdog is not None:
        run.watchdog.failed = True
    if run.world_size == 1 or _SETTLED in vars(error):
        return error
    cause = _cause(error, run)
    vars(cause)[_SETTLED] = True
    return cause


def _cause(error: BaseException, run: Diagnosed) -> BaseException:
    post = _Post(run.collectives)
    if is_echo(error):
        knows_nobody = run.neighbours is None or isinstance(error, PeerError)
        return post.note(NOTE_S) or error if knows_nobody else _look_around(error, run, post)
    if isinstance(error, Exception):
        post.leave_note(f"rank {run.rank} failed with {type(error).__name__}: {str(error).rstrip('.')}")
    return error


def _look_around(error: BaseException, run: Diagnosed, post: _Post) -> BaseException:
    """Return what another rank or this one knows of the cause of `error`, or `error` if that is nothing."""
    assert run.neighbours is not None
    mine = run.neighbours.failed_in = where_raised(error)
    peers, (answers, post.is_open) = run.neighbours.peers, run.neighbours.probe()
    if known := post.note(AT_ONCE_S):
        return known
    alive = {rank for rank, answer in answers.items() if answer == "alive"}
    doing = run.neighbours.ask(alive) if alive else {}
    elsewhere = {rank for rank, told in doing.items() if told.partition(" (")[0] != mine.partition(" (")[0]}
    absent = alive - post.report(alive)
    absent = elsewhere if elsewhere and _waited_s(error, run) else absent
    silent, gone = ([peer for peer in peers if answers.get(peer.rank) == kind] for kind in ("silent", "gone"))
    missing = [peer for peer in peers if peer.rank in absent]
    found = _finding(error, run, silent, gone, missing, mine, doing)
    # A timeout is first-hand news. A closed connection may be the work of a rank that is about to say more.
    if known := post.note(AT_ONCE_S if found is not None and _waited_s(error, run) else NOTE_S):
        return known
    if found is None:
        return error
    post.leave_note(found.found)
    found.__cause__ = error
    return found


def where_raised(error: BaseException) -> str:
    """Return in which call `error` was raised, and from which line of the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return where(None if trace is None else trace.tb_frame)


def _finding(
    error: BaseException, run: Diagnosed, silent: list[Peer], gone: list[Peer], missing: list[Peer], mine: str,
    doing: Mapping[int, str],
) -> PeerError | None:  # fmt: skip
    """Put into a sentence who is at fault; None if nobody is, as far as this rank can see."""
    rank, waited_s = run.rank, _waited_s(error, run)
    expected = f"every rank to answer within the timeout of {waited_s:g} s"
    if silent:
        before = f"has heard nothing from {_names(silent)} for {waited_s:g} s, and cannot reach " if waited_s else ""
        them = _of(silent, "it", "them") if waited_s else f"cannot reach {_names(silent)}"
        return PeerError(
            f"rank {rank} {before}{them}" + (f"; {_are_gone(gone)}" if gone else ""),
            expected=expected if waited_s else "all ranks to stay until the end",
            do=f"look at {_of(silent, 'that machine', 'those machines')} and the link to it, or raise the timeout",
        )
    if gone:
        return PeerError(
            f"rank {rank} lost its connection: {_are_gone(gone)}", expected="all ranks to stay until the end",
            do="the output of its process, or the log of its machine (out of memory?), may tell more",
        )  # fmt: skip
    if not waited_s:
        return None  # a network error of the user's own, perhaps: it stands
    differ = any(peer.rank in doing for peer in missing)
    return PeerError(
        f"rank {rank} has heard nothing from {_names(missing) if missing else 'the others'} for {waited_s:g} s in "
        f"{mine}{_calls(rank, mine, missing, doing)}; everybody's machine can be reached", expected=expected,
        do="make the same calls on all ranks; if one is only slow, raise the timeout" if differ else
        f"see what {_of(missing, 'that rank is', 'those ranks are')} doing: stuck, slow, or cut off until a moment "
        "ago; or raise the timeout",
    )  # fmt: skip


def _calls(rank: int, mine: str, missing: list[Peer], doing: Mapping[int, str]) -> str:
    """Tell what the `missing` ranks are doing, and which ranks left out a metric that another waits to reduce."""
    told = "".join(f"; rank {peer.rank} is in {doing[peer.rank]}" for peer in missing[:_NAMED] if peer.rank in doing)
    everybody = {rank: mine, **doing}
    logs = next((text.partition(" (")[0] for text in everybody.values() if text.startswith("log(")), None)
    if logs is None:
        return told
    without = [str(other) for other, text in sorted(everybody.items()) if not text.startswith(logs)]
    more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
    return f"{told}; rank {', '.join(without[:_NAMED])}{more} did not call {logs}" if without else told


def _are_gone(gone: list[Peer]) -> str:
    return f"{_names(gone)} {_of(gone, 'is', 'are')} gone"


def _names(peers: list[Peer]) -> str:
    *others, last = map(str, peers)
    if len(others) > _NAMED:
        return f"{', '.join(others[:_NAMED])} and {len(others) - _NAMED + 1} others"
    return f"{', '.join(others)} and {last}" if others else last


def _of(peers: list[Peer], one: str, several: str) -> str:
    return one if len(peers) == 1 else several


def _waited_s(error: BaseException, run: Diagnosed) -> float:
    """Return how long this rank waited, if `error` says that its patience ended; 0 if another broke the connection."""
    if _TIMED_OUT.search(str(error)) is None:
        return 0.0
    told = _MILLISECONDS.search(str(error))
    return int(told[1] or told[2]) / 1000 if told else run.join_timeout.total_seconds()


# --- Notes -------------------------------------------------------------------------------------------------------


class _Post:
    """Notes to and from other ranks, by way of the store. If it keeps us waiting once, it is not asked again."""

    def __init__(self, collectives: Collectives, store_s: float = STORE_S) -> None:
        self._collectives, self.is_open, self._store_s = collectives, True, store_s

    def note(self, limit_s: float) -> PeerError | None:
        """Return the note of another rank as an error, if one comes within `limit_s`."""
        note = self._ask(lambda: self._collectives.read_note(limit_s), limit_s + self._store_s)
        return None if note is None else PeerError(note, do="this rank stops with it")

    def leave_note(self, text: str) -> None:
        """Tell the others `text`, unless somebody has told them something already."""
        self._ask(lambda: self._collectives.leave_note(text), self._store_s)

    def report(self, alive: set[int]) -> set[int]:
        """Write this rank's failure report; return who of those `alive` has reported, once all have or the time is up.

        Where there is no board the time passes all the same: who leaves first would be taken for the one that is lost.
        """
        deadline, reported = time.monotonic() + REPORT_S, set[int]()

        def report_and_read() -> None:
            board = self._collectives.board()
            board.put(f"reported/{self._collectives.rank}", "")
            while reported != alive and time.monotonic() < deadline:
                reported.update(rank for rank in alive - reported if board.get(f"reported/{rank}") is not None)
                time.sleep(0.02)

        self._ask(report_and_read, REPORT_S + STORE_S)
        if reported != alive:
            time.sleep(max(0.0, deadline - time.monotonic()))
        return set(reported)

    def ask(self, call: Callable[[], Any]) -> Any:
        """Return what `call`, a question to the store, returns; None if it fails or takes too long."""
        return self._ask(call, self._store_s)

    def _ask(self, call: Callable[[], Any], limit_s: float) -> Any:
        """Return what `call` returns; None if it fails, or takes longer, as it does where the store's host is stuck."""
        outcome: list[Any] = []

        def attempt() -> None:
            with contextlib.suppress(Exception):
                outcome.append(call())

        if not self.is_open:
            return None
        thread = threading.Thread(target=attempt, daemon=True, name="stratagem-note")
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on no thread starts while the interpreter ends
            attempt()
            return outcome[0] if outcome else None
        thread.join(limit_s)
        self.is_open = not thread.is_alive()
        return outcome[0] if outcome else None


# --- Doors -------------------------------------------------------------------------------------------------------


def _open_endpoint(world: World) -> tuple[socket.socket | None, str]:
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
    _endpoints.add(endpoint)
    return endpoint, address


_TOKEN = 16


def _tell(neighbours: weakref.ref[Neighbours], endpoint: socket.socket, token: bytes) -> None:
    """Tell each who brings `token` what the main thread is doing, until the endpoint is closed."""
    while True:
        try:
            client, _ = endpoint.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), client:
            client.settimeout(ASK_S)
            if secrets.compare_digest(client.recv(_TOKEN, socket.MSG_WAITALL), token):
                here = neighbours()
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                client.sendall(((here.failed_in if here is not None else "") or where(frame)).encode())


def _ask_all(peers: list[Peer], token: bytes, deadline: float) -> dict[int, str]:
    told: dict[int, str] = {}
    with contextlib.ExitStack() as opened:
        asked = {}
        for peer in peers:
            with contextlib.suppress(OSError):
                left_s = max(0.01, deadline - time.monotonic())
                asked[peer.rank] = opened.enter_context(
                    socket.create_connection((peer.address, peer.port or 0), left_s)
                )
                asked[peer.rank].sendall(token)
        for rank, endpoint in asked.items():
            with contextlib.suppress(OSError):
                endpoint.settimeout(max(0.01, deadline - time.monotonic()))
                if words := b"".join(iter(lambda endpoint=endpoint: endpoint.recv(1 << 12), b"")):  # type: ignore[misc]
                    told[rank] = words.decode(errors="replace")
    return told


def _probe(endpoints: Mapping[int, tuple[str, int]], deadline: float) -> dict[int, Answer]:
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
    if code == 0:
        return "alive"
    return "gone" if code == errno.ECONNREFUSED else "silent"


def _close_endpoints() -> None:
    """In a forked child: an endpoint that a copy holds open would answer for a process that has ended."""
    for endpoint in list(_endpoints):
        endpoint.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_endpoints)
