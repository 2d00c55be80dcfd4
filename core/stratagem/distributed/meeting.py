"""The meeting of all ranks before they connect: arrivals in the store, and the verdict of rank 0.

[Note: meeting]
Each process appends its *arrival*, a mapping, to a list in the store. Rank 0 reads the list in order, compares, and
writes the *verdict* once: either an error for all ranks, or that they agree and how many arrivals were read. A process
whose arrival has a higher number than that is not one of the ranks: another process came in its place, or the store
belongs to another run. A process that fails before it arrives appends its error instead.
Nothing here waits for another rank: callers of this poll, so that they can say what they wait for, and stop at a
signal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any


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
