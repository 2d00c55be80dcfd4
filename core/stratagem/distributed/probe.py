"""Find out what listens at an address: the store of a run, another program, or nothing yet."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from stratagem.errors import LaunchError

if TYPE_CHECKING:
    from stratagem.api.world import World

#: How long a program may accept connections without answering as a store, before it is taken for another program.
MUTE_S = 10.0

#: After how long a rank that waits says so for the first time; then again after twice the time, and so on.
FIRST_NOTICE_S = 10.0

_CONNECT_S = 3.0

# What a client of torch's TCPStore sends first: QueryType::VALIDATE with the number by which it knows a store, then
# QueryType::PING with a number that the store returns.
_VALIDATE, _PING, _STORE = 0, 13, 0x3C85F7CE


@frozen
class Answer:
    """What listens at an address, and what happened when it was asked.

    "mute" accepts connections and does not answer; "nothing" does not accept any.
    """

    kind: Literal["store", "other", "mute", "nothing"]
    reason: str = ""


def ask(address: str, port: int, limit_s: float) -> Answer:
    """Return what listens at `address`, after at most about `limit_s` seconds.

    torch's own client cannot be used to find out: it waits forever for a program that accepts connections and does not
    answer, and prints stack traces while it tries again.
    """
    try:
        connection = socket.create_connection((address, port), timeout=min(limit_s, _CONNECT_S))
    except OSError as error:
        return Answer("nothing", _reason(error))
    number = os.getpid()
    with connection:
        connection.settimeout(limit_s)
        try:
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _STORE, _PING, number))
            told = connection.recv(64)
        except TimeoutError:
            return Answer("mute", "it accepts connections and sends nothing")
        except OSError as error:
            return Answer("mute", f"it closes connections: {_reason(error)}")
    if told == struct.pack("=I", number):
        return Answer("store")
    if not told:
        return Answer("mute", "it closes connections without an answer")
    return Answer("other", f"it answers {told[:20]!r}")


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within the time limit"
    return (error.strerror or str(error)).lower()


class Notices:
    """Tells when a rank that waits has to say so."""

    def __init__(self) -> None:
        self._begun, self._next_s = time.monotonic(), FIRST_NOTICE_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._begun

    def due(self) -> bool:
        """Return whether a notice is due, once for each."""
        due = self.waited_s >= self._next_s
        while self.waited_s >= self._next_s:
            self._next_s *= 2
        return due


def notify(text: str) -> None:
    """Print a notice on stderr."""
    print(f"stratagem: {text}", file=sys.stderr, flush=True)


def wait_for_store(world: World, place: tuple[str, int], limit_s: float) -> None:
    """Return once a store answers at `place`; after some seconds of waiting, say for what.

    Raises:
        LaunchError: no store answered within `limit_s` seconds, or another program listens there.
    """
    notices, mute_since = Notices(), float("inf")
    at, pause_s = f"{place[0]}:{place[1]}", 0.02
    while True:
        asked_at = time.monotonic()
        answer = ask(*place, limit_s=max(0.1, min(MUTE_S, limit_s - notices.waited_s)))
        if answer.kind == "store":
            return
        mute_since = min(mute_since, asked_at) if answer.kind == "mute" else float("inf")
        # A launcher that hosts the store listens before it answers: it starts its processes first.
        is_other = not world.store_hosted and time.monotonic() - mute_since >= MUTE_S
        if answer.kind == "other" or is_other:
            raise _not_a_store(world, at, answer)
        if notices.waited_s >= limit_s:
            raise _no_store(world, at, answer, limit_s)
        if notices.due() and (world.local_rank == 0 or world.rank == 1):
            notify(
                f"rank {world.rank} of {world.world_size} waits for the store of rank 0 at {at} ({answer.reason}); "
                f"it waits {limit_s:g} s in all"
            )
        time.sleep(pause_s)
        pause_s = min(0.5, 1.5 * pause_s)


def _not_a_store(world: World, at: str, answer: Answer) -> LaunchError:
    return LaunchError(
        f"rank {world.rank} of {world.world_size} found another program at {at}, not the store of rank 0 "
        f"({answer.reason})",
        expected="a port that only this run uses",
        do="choose another MASTER_PORT, the same for all ranks, and check that MASTER_ADDR is the machine of rank 0",
    )


def _no_store(world: World, at: str, answer: Answer, limit_s: float) -> LaunchError:
    return LaunchError(
        f"rank {world.rank} of {world.world_size} found no store at {at} for {limit_s:g} s (at the last attempt: "
        f"{answer.reason})",
        expected="rank 0 to listen there",
        do="check that rank 0 was started, that MASTER_ADDR and MASTER_PORT are its address and port on every node, "
        "and that no firewall blocks the port",
    )
