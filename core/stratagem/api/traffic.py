"""How many bytes a process gave to its collectives, and how many of them a wire has to carry.

[Note: wire bytes]
What a process sends depends on how a backend spreads a collective over the ranks. Counted is what the best of them
must send, n ranks given: an all-reduce of b bytes 2 b (n-1)/n, a broadcast or an all-to-all b (n-1)/n, an all-gather
b (n-1), a message to another rank b. gloo's and NCCL's rings for large tensors reach these figures.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from attrs import define, field

#: Shares of the bytes given that have to be sent, for n ranks.
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "exchange": lambda n: (n - 1) / n,
    "all_gather": lambda n: float(n - 1),
    "send": lambda _: 1.0,
}


def wire_bytes(collective: str, num_bytes: int, world_size: int) -> float:
    """Return how many of `num_bytes` each rank has to send; see [Note: wire bytes]."""
    return _SHARES[collective](world_size) * num_bytes if world_size > 1 else 0.0


@define
class Count:
    """What was sent by one collective, on behalf of one sender."""

    calls: int = 0
    #: Bytes that the collective was given.
    payload: int = 0
    #: Bytes of them that had to be sent, as in [Note: wire bytes].
    wire: float = 0.0


@define(eq=False, repr=False)
class Traffic:
    """The counts of one process, by collective and by sender."""

    counts: dict[tuple[str, str], Count] = field(factory=dict)
    #: By comm hook, the outermost first: bytes of the buckets that came in, and what an all-reduce of them would send.
    buckets: dict[str, Count] = field(factory=dict)
    _sender: threading.local = field(init=False, factory=threading.local)

    def add(self, collective: str, num_bytes: int, world_size: int, calls: int = 1, sender: str | None = None) -> None:
        """Count `calls` collectives over `world_size` ranks that were given `num_bytes` together.

        The sender is `sender`, else the one of the surrounding `sent_by`, else "".
        """
        key = (collective, getattr(self._sender, "name", "") if sender is None else sender)
        count = self.counts.get(key)
        if count is None:
            count = self.counts[key] = Count()
        count.calls += calls
        count.payload += num_bytes
        count.wire += wire_bytes(collective, num_bytes, world_size)

    def add_bucket(self, hook: str, num_bytes: int, world_size: int) -> None:
        """Count a bucket that was given to comm hook `hook`."""
        count = self.buckets.setdefault(hook, Count())
        count.calls += 1
        count.payload += num_bytes
        count.wire += wire_bytes("all_reduce", num_bytes, world_size)

    @contextlib.contextmanager
    def sent_by(self, name: str) -> Iterator[None]:
        """Within, in this thread: what is sent is sent by `name`."""
        before = getattr(self._sender, "name", "")
        self._sender.name = name
        try:
            yield
        finally:
            self._sender.name = before
