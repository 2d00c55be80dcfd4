"""End a process that waits for a rank that is gone, where no collective raises: NCCL's wait on the GPU.

[Note: lost ranks under NCCL]
gloo raises as soon as a connection breaks. A kernel of NCCL goes on waiting, the main thread waits for the kernel, and
torch aborts the process when the timeout is over, and does not tell which rank is gone. So a thread probes the
endpoints of the next ranks every few seconds, and reads the failure report in the store. It ends the process once both
are true:

* a rank failed (its report says so), or its process or machine is gone and it did not say that it left in order;
* the main thread has not moved for a while: a rank that is not waiting may still have something to finish. Where the
  store went with the lost rank, which may have left in order, that takes three times as long.

It does not end the process while a save runs in the background. Before it ends, the process leaves its own report for
the ranks that see less, and stays until they have read it; if the main thread moves after all, it goes on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.distributed.call_site import where
from stratagem.distributed.launched import tell_launcher
from stratagem.errors import PeerError
from stratagem_peer_diagnosis.diagnosis import finding
from stratagem_peer_diagnosis.failure_reports import AT_ONCE_S, FailureReports

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_peer_diagnosis.endpoints import Answer, Endpoints

#: How often ranks are probed.
INTERVAL_S = 5.0
#: How long the main thread has to stand still.
STUCK_S = 15.0
#: How long the store may take to answer. No one waits for it, so a busy one has time.
STORE_S = 8.0
#: How many of the next ranks each rank probes: all ranks together probe each one so often.
PROBED = 2
#: Probes in a row without an answer after which a machine counts as gone; a busy one may miss one.
SILENT_PROBES = 3


def end_process(error: PeerError, rank: int) -> None:
    """Report `error` and end this process: nothing else gets its main thread out of a wait for the GPU."""
    tell_launcher(error, rank)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


class Watchdog:
    """Looks for lost ranks while `run` is connected; see [Note: lost ranks under NCCL]."""

    def __init__(
        self, run: RunContext, endpoints: Endpoints, interval_s: float = INTERVAL_S, stuck_s: float = STUCK_S,
        die: Callable[[PeerError, int], Any] = end_process,
    ) -> None:  # fmt: skip
        self._run, self.interval_s, self.stuck_s, self._die = weakref.ref(run), interval_s, stuck_s, die
        self._rank, self._world_size, self._endpoints = run.rank, run.world_size, endpoints
        self._store = run.collectives.key_value_store()
        self._reports = FailureReports(run.collectives, STORE_S, store=self._store)
        #: A process group of the user's may hold the report of an earlier run.
        earlier = self._reports.read(0.0)
        self._earlier = None if earlier is None else earlier.found
        self._closing = threading.Event()
        self._silent: dict[int, int] = {}
        self._place: Any = None
        self._since = time.monotonic()
        #: The store could be asked whether those that are gone left in order.
        self._sure = True
        #: When this process told the others that it is about to end, and the report that it left for that.
        self._told_at, self._own = math.inf, ""
        #: An error went through the run: this rank waits for no other any more, and does not leave in order.
        self.failed = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="stratagem-watchdog")

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and tell the other ranks that this one leaves in order. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        if not self.failed:
            self._reports.is_open = True
            self._reports.ask(lambda: self._store.put(self._left(self._rank), ""))

    def _watch(self) -> None:
        while not self._closing.wait(self.interval_s):
            if self.failed:
                return
            self._look_at_main_thread()
            self._reports.is_open = True  # a store that was slow once is asked again
            cause = self._lost()  # each time: a machine that was silent may answer again
            stuck = time.monotonic() - self._since >= (self.stuck_s if self._sure else 3 * self.stuck_s)
            if cause is None or not stuck or self._is_saving():
                self._told_at = math.inf
            elif self._told_at == math.inf:
                self._tell(cause)
            elif time.monotonic() - self._told_at >= 2 * self.interval_s:  # for the others to read it
                self._die(cause, self._rank)
                return

    def _tell(self, cause: PeerError) -> None:
        """Leave the report of `cause`, unless it is another rank's, which stands."""
        self._told_at = time.monotonic()
        known = self._reports.read(AT_ONCE_S)
        if known is None or known.found != cause.found:
            self._own = cause.found
            self._reports.write(cause.found)

    def _is_saving(self) -> bool:
        """Whether a save runs in the background. It ends, or fails: it is sent over gloo."""
        run = self._run()
        return run is not None and run.saver.is_running

    def _look_at_main_thread(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        # In a loop, each pass may wait in the same place for the GPU.
        place: list[Any] = [self._batches()]
        while frame is not None:
            place.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        if place != self._place:
            self._place, self._since = place, time.monotonic()

    def _batches(self) -> int:
        run = self._run()
        return 0 if run is None else run.step.batches_copied

    def _lost(self) -> PeerError | None:
        """Return what another rank reports, or which ranks are gone; None if all is well as far as can be seen."""
        known = self._reports.read(AT_ONCE_S)
        if known is not None and known.found not in (self._earlier, self._own):
            return known
        next_ranks = {(self._rank + step) % self._world_size for step in range(1, PROBED + 1)} - {self._rank}
        if not self._gone(next_ranks):
            return None
        others = {peer.rank for peer in self._endpoints.peers}
        lost = self._gone(others)  # a machine may have taken several with it
        gone, silent = (
            [peer for peer in self._endpoints.peers if lost.get(peer.rank) == kind] for kind in ("gone", "silent")
        )
        run = self._run()
        if run is None or not (gone or silent):
            return None
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return finding(RuntimeError(), run, silent, gone, [], where(main), {}, {})

    def _gone(self, ranks: set[int]) -> dict[int, Answer]:
        """Return which of `ranks` are gone without having left in order."""
        lost: dict[int, Answer] = {}
        for rank, answer in self._endpoints.probe_ranks(ranks).items():
            self._silent[rank] = self._silent.get(rank, 0) + 1 if answer == "silent" else 0
            if answer == "gone" or self._silent[rank] >= SILENT_PROBES:
                lost[rank] = answer
        store_answers = functools.cache(self._endpoints.store_answers)
        return {rank: answer for rank, answer in lost.items() if not self._left_in_order(rank, store_answers)}

    def _left_in_order(self, rank: int, store_answers: Callable[[], bool]) -> bool:
        """Whether `rank` said so, or may have: the store's host can be reached and takes long to tell."""
        told = self._reports.ask(lambda: (self._store.get(self._left(rank)),))
        self._sure = told is not None
        if told is None:
            return not self._reports.is_open and store_answers()
        return told[0] is not None

    def _left(self, rank: int) -> str:
        """Return where `rank` says that it leaves this run in order."""
        return f"left/{self._endpoints.token.hex()}/{rank}"
