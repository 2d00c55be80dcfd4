"""What a rank that fails tells the others, in the key-value store of the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.errors import PeerError

if TYPE_CHECKING:
    from stratagem.api import Collectives

#: How long ranks wait for each other's reports. A rank that hosts the store stays so long, for others to look.
REPORT_S = 1.0
#: How long a rank that only lost a connection waits for the report of one that knows more.
CAUSE_S = 2.0
#: How long to wait for a report that should be there already, and how long the store may take: its host may be cut off.
AT_ONCE_S = 0.05
STORE_S = 1.0


class FailureReports:
    """The reports of all ranks. A store that was slow once is not asked again."""

    def __init__(self, collectives: Collectives, store_s: float = STORE_S) -> None:
        self._collectives, self.is_open, self._store_s = collectives, True, store_s

    def read(self, limit_s: float) -> PeerError | None:
        """Return the cause that a rank reported as an error, if one does within `limit_s`."""
        cause = self._ask(lambda: self._collectives.read_failure_report(limit_s), limit_s + self._store_s)
        return None if cause is None else PeerError(cause, do="this rank stops with it")

    def write(self, cause: str) -> None:
        """Report `cause` to the others, unless a rank has reported one already."""
        self._ask(lambda: self._collectives.report_failure(cause), self._store_s)

    def exchange(self, alive: set[int]) -> set[int]:
        """Report that this rank failed; return which of the ranks `alive` did, once all have or the time is up.

        Where there is no store the time passes all the same: a rank that leaves first would be taken for the lost one.
        """
        deadline, reported = time.monotonic() + REPORT_S, set[int]()

        def report_and_read() -> None:
            store = self._collectives.key_value_store()
            store.append("reported", f"{self._collectives.rank} ")
            while reported != alive and time.monotonic() < deadline:
                reported.update(alive.intersection(map(int, (store.get("reported") or "").split())))
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
        thread = threading.Thread(target=attempt, daemon=True, name="stratagem-failure-report")
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on no thread starts while the interpreter ends
            attempt()
            return outcome[0] if outcome else None
        thread.join(limit_s)
        self.is_open = not thread.is_alive()
        return outcome[0] if outcome else None
