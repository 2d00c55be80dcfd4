"""What a rank that fails tells the others, in the key-value store of the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.errors import PeerError
from stratagem_evidence import as_text, from_text

if TYPE_CHECKING:
    from pathlib import Path

    from stratagem.api import Collectives
    from stratagem.api.group_services import KeyValueStore
    from stratagem.api.world import World
    from stratagem_evidence import RankEvidence

#: How long ranks wait for each other's reports. A rank that hosts the store stays so long, for others to look.
REPORT_S = 1.0
#: How long a rank that only lost a connection waits for the report of one that knows more.
CAUSE_S = 2.0
#: How long a machine waits for the evidence of the others.
GATHER_S = 2.0
#: Of so many machines each asks all others.
_FEW = 8
#: How long to wait for a report that should be there already, and how long the store may take: its host may be cut off.
AT_ONCE_S = 0.05
STORE_S = 1.0
#: Stands in a report before what to do, and at its end.
_DO, _END = "\x1e", "\x1d"


#: Key of the reports, the first of which stands. In the folder for evidence: what a rank of this machine found.
_CAUSE = "cause"


def forget_cause(folder: Path) -> None:
    """Delete what an earlier run of the same processes found."""
    with contextlib.suppress(OSError):
        (folder / _CAUSE).unlink(missing_ok=True)


class FailureReports:
    """The reports of all ranks. A store that was slow once is not asked again.

    Args:
        folder: where the ranks of this machine leave what they found: the store's host may be gone.
        store: a connection to the store; by default the one of `collectives`.
    """

    def __init__(
        self, collectives: Collectives, store_s: float = STORE_S, folder: Path | None = None,
        store: KeyValueStore | None = None,
    ) -> None:  # fmt: skip
        self._collectives, self.is_open, self._store_s, self._store = collectives, True, store_s, store
        self._file = None if folder is None else folder / _CAUSE

    @property
    def _reports(self) -> KeyValueStore:
        return self._store or self._collectives.key_value_store(shared=True)

    def read(self, limit_s: float) -> PeerError | None:
        """Return the cause that a rank reported as an error, if one does within `limit_s`."""
        cause = self._ask(lambda: self._first_report(limit_s), limit_s + self._store_s)
        if cause is None and self._file is not None and self._file.exists():
            cause = self._file.read_text()
        if cause is None:
            return None
        found, _, do = cause.partition(_DO)
        return PeerError(found, do=do or "this rank stops with it")

    def _first_report(self, limit_s: float) -> str | None:
        store, deadline = self._reports, time.monotonic() + limit_s
        while not (reports := store.get(_CAUSE)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return reports.partition(_END)[0] if reports else None

    def write(self, cause: str) -> None:
        """Report `cause` to the others, unless a rank has reported one already."""
        self._ask(lambda: self._reports.append(_CAUSE, f"{cause}{_END}"), self._store_s)

    def write_finding(self, cause: PeerError) -> None:
        """Report `cause`, and what to do, to the others, unless a rank has reported one already."""
        text = f"{cause.found}{_DO}{cause.do}"
        self.write(text)
        if self._file is not None:
            with contextlib.suppress(OSError), self._file.open("x") as file:
                file.write(text)

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

    def gather(self, known: dict[int, RankEvidence], world: World | None) -> dict[int, RankEvidence]:
        """Tell the other machines what is `known` of the ranks of this one; return that with what they tell.

        Of many machines only the one with rank 0 asks the others; its finding is a report.
        """
        assert world is not None, "connected"
        gathered = dict(known)

        def tell_and_ask() -> None:
            store, deadline = self._collectives.key_value_store(), time.monotonic() + GATHER_S
            store.put(f"evidence/{world.node_rank}", as_text(known))
            asked = set(range(world.num_nodes)) - {world.node_rank}
            asked = asked if world.node_rank == 0 or world.num_nodes <= _FEW else set()
            while asked and time.monotonic() < deadline:
                for node in sorted(asked):
                    if (text := store.get(f"evidence/{node}")) is not None:
                        gathered.update(from_text(text))
                        asked.remove(node)
                time.sleep(0.02)

        if world.num_nodes > 1:
            self._ask(tell_and_ask, GATHER_S + self._store_s)
        return gathered

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
