"""Check that all ranks do the same things in the same order, without a message where they do as before.

[Note: the order of events]
The collectives of some engines carry no names. If one rank gathers or reduces another layer than the others do, or
gradients of other parameters, one layer's numbers are added to another's; where sizes differ, gloo aborts the process.
So each collective is an *event*, and no rank may begin one that the others do not begin.

The ranks compare the events of the first step of a kind, one by one, before each collective. That step's *order* is
then known to all of them, and a rank follows it without messages: as long as its events are the expected ones it only
compares two tuples. A rank whose event is another one *diverges* from the order. It writes that to the store, before it
begins a collective, and waits until the others have diverged at the same place with the same event, which is how a
model may change from step to step. If they have not, it raises. The others may wait by then in a collective that it
does not join: on each rank a thread answers for them, which looks at the store when nothing has happened for a while.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import StratagemError
from stratagem_sharding.sharded_use import few

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext


#: How long a rank that diverges from the order waits for the others, as a part of the timeout of a collective.
_PART_OF_TIMEOUT = 0.9
#: How often the thread of a rank that waits looks whether another one has diverged.
_LOOK_S = 0.5
#: So many orders are kept for a kind of step.
_MAX_ORDERS = 16
_orders = itertools.count()

#: What a rank is about to do, first of which kind.
Event = tuple[Any, ...]


class Order:
    """The order of events in steps: the same on all ranks. See [Note: the order of events].

    Args:
        run: whose ranks are compared.
        peers: these ranks.
    """

    def __init__(self, run: RunContext, peers: Collectives) -> None:
        self._peers, self._collectives = peers, run.collectives
        #: The numbers in the run of the ranks that are compared.
        self._ranks: list[int] = peers.all_gather_object(run.rank)
        #: There are no other ranks: in a plan they are taken to do the same.
        self._is_alone = peers.world_size == 1 or run.environment.simulated
        self._limit_s = _PART_OF_TIMEOUT * run.stack.timeouts().collective.total_seconds()
        self._key, self._round = f"order/{next(_orders)}/{self._ranks[0]}", 0
        self._known: dict[Hashable, list[tuple[Event, ...]]] = {}
        self._open, self._steps, self._scopes = False, 0, 0
        self._store: Any = None
        self._exchanging, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        #: The orders of the steps of this kind, the latest last.
        self._kind: list[tuple[Event, ...]] = []
        self._seen: list[Event] = []
        #: None: the ranks compare each event.
        self._expected: tuple[Event, ...] | None = None

    def begin(self, kind: Hashable, *, scope: tuple[Event, ...] | None = None) -> None:
        """Begin a step of this `kind`.

        Args:
            scope: it is not a step, but code between steps, which is expected to have these events.
        """
        if self._is_alone:
            return
        known = self._kind = self._known.setdefault(kind, [] if scope is None else [scope])
        self._open, self._seen, self._expected = True, [], known[-1] if known else None
        self._steps, self._scopes = (self._steps + 1, 0) if scope is None else (self._steps, self._scopes + 1)
        if self._thread is None:
            arguments = (weakref.ref(self), self._closing)
            self._thread = threading.Thread(
                target=_answer_while_open, args=arguments, name="stratagem-order", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """End the step: its events are what a step of this kind is expected to have next."""
        self._open = False
        if not self._kind or self._expected is not self._kind[-1]:
            order = tuple(self._seen)
            self._kind[:] = [*[each for each in self._kind if each != order][1 - _MAX_ORDERS :], order]

    def next(self, event: Event) -> None:
        """Return once all ranks are about to begin `event`.

        Raises:
            StratagemError: others begin another one.
        """
        if not self._open:
            return
        place, expected = len(self._seen), self._expected
        self._seen.append(event)
        if expected is not None and place < len(expected) and expected[place] == event:
            return
        self._compare(event, on_all_ranks=expected is None or place >= len(expected))
        same = (each for each in reversed(self._kind) if list(each[: place + 1]) == self._seen)
        self._expected = next(same, None)

    def close(self) -> None:
        """End the thread that answers for this rank."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(Exception):  # the store may be gone with the rank that hosts it
                self._collectives.key_value_store().put(f"{self._key}/ended", "1")
        self._thread = self._store = None

    def _compare(self, event: Event, *, on_all_ranks: bool) -> None:
        mine = (*self._where, *event)
        if on_all_ranks:
            checksum = torch.tensor([zlib.crc32(repr(mine).encode())])
            with self._peers.traffic.sent_by("comparison of ranks"):
                checksums = self._peers.all_gather(checksum)
            if len({int(each) for each in checksums}) == 1:
                return
            found = dict(enumerate(self._peers.all_gather_object(mine)))
        else:
            with self._exchanging:
                found = self._exchange(mine)
        if len(found) < self._peers.world_size or len(set(found.values())) > 1:
            raise self._error(found)

    def _exchange(self, mine: Event) -> dict[int, Event]:
        """Write to the store where this rank is; return where those are that write it within the limit, by rank."""
        key, rank, size = f"{self._key}/{self._round}", self._peers.rank, self._peers.world_size
        self._store = self._store or self._collectives.key_value_store()
        self._round += 1
        self._store.put(f"{key}/{rank}", json.dumps(mine))
        self._store.put(f"{key}/left", json.dumps(mine[:3]))
        deadline = time.monotonic() + self._limit_s
        if rank == 0:  # one rank reads what all have written
            written = {each: self._read(f"{key}/{each}", deadline) for each in range(1, size)}
            self._store.put(f"{key}/all", json.dumps([mine, *written.values()]))
        else:
            written = dict(enumerate(self._read(f"{key}/all", deadline + 1) or []))
        written[rank] = mine
        return {each: _tuples(where) for each, where in written.items() if where is not None}

    def _read(self, key: str, deadline: float) -> Any:
        """Return what is put under `key` until the `deadline`, or until a rank has ended; None if nothing is."""
        pause_s = 0.0005
        while True:
            has_ended = self._store.get(f"{self._key}/ended")  # asked first: a rank writes its event before it ends
            if (text := self._store.get(key)) is not None:
                return json.loads(text)
            if has_ended or time.monotonic() > deadline or self._closing.is_set():
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    @property
    def _where(self) -> tuple[int, int, int]:
        return self._steps, self._scopes, len(self._seen) - 1

    def answer(self, before: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return where this rank is, as a step, code of a user after it, and a place in either.

        Also write it to the store, if the rank was there `before` and another one has diverged at that place or sooner.
        """
        *here, place = where = self._where
        if where != before or place < 0:
            return where
        with contextlib.suppress(Exception), self._exchanging:  # the store may be gone with the rank that hosts it
            self._store = self._store or self._collectives.key_value_store()
            left = self._store.get(f"{self._key}/{self._round}/left")
            if left is not None and tuple(json.loads(left)) <= where:
                if json.loads(left)[:2] == here:  # write what it did there, not where it is since
                    place = json.loads(left)[2]
                self._exchange((*here, place, *self._seen[place]))
        return where

    def _told(self, found: Mapping[int, Event], describe: Callable[[Event | None], str]) -> str:
        """Return what `describe` says of the event of each rank, or of None, those that say the same together."""
        groups: dict[str, list[int]] = {}
        for rank in range(self._peers.world_size):
            groups.setdefault(describe(found[rank][3:] if rank in found else None), []).append(self._ranks[rank])
        return "; ".join(
            f"rank {ranks[0]} {text}" if len(ranks) == 1 else f"ranks {few(ranks)} {text.replace('has', 'have', 1)}"
            for text, ranks in groups.items()
        )

    def _error(self, found: Mapping[int, Event]) -> StratagemError:
        """Return an error that says where the ranks in `found` are; the others did not say it within the limit."""
        raise NotImplementedError


def _answer_while_open(order: weakref.ref[Order], closing: threading.Event) -> None:
    """Answer for a rank that waits in a collective, until `closing` is set or the order is deleted."""
    where = (0, 0, 0)
    while not closing.wait(_LOOK_S):
        held = order()
        if held is None:
            return
        where = held.answer(where)
        del held


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
