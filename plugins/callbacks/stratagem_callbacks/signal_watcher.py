"""Have all ranks stop after the same batch when a signal reaches one of them.

[Note: agreeing on a step]
A signal reaches ranks at different times, or only one of them. A collective after each step would be too expensive, so
a thread on each rank polls a key in the key-value store. A rank with a signal sets the key. Each thread that reads it
posts the number of the last batch that its rank has started; from then on the main thread of the rank starts no other
batch before it has read the posts of all ranks. The highest number is the last batch for all: a rank that has started
it needs the other ranks to finish it. A single process needs no polling.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.errors import PeerError

#: More batches than any run has.
_NO_LIMIT = 10**18
#: Seconds that the end of a fit waits for the polling thread.
_STOP_S = 2.0


class SignalWatcher:
    """Handle signals and poll the key-value store on one rank; see [Note: agreeing on a step].

    Args:
        name: the prefix of the keys: different for each watcher that uses the store, the same on all ranks.
        on_request: called in the thread when any rank has a signal, before this rank posts its number.
        after_post: called in the thread afterwards.
        begun: returns the number to post, in place of the attribute `begun`.
        patience_s: seconds to wait for the posts of all ranks.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, look_every_s: float, *, name: str,
        on_request: Callable[[], None] | None = None, after_post: Callable[[], None] | None = None,
        begun: Callable[[], int] | None = None, patience_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.store, self.rank, self.world_size, self.look_every_s = store, rank, world_size, look_every_s
        self.name, self.on_request, self.after_post, self.patience_s = name, on_request, after_post, patience_s
        self.number_begun = begun
        #: Number of the last batch that this rank has started, or is about to.
        self.begun = 1
        self.requested = False
        self._signal = ""
        #: Wakes the thread. A signal handler may put into it at any moment.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._over = False
        self._last: int | None = None
        self._thread = threading.Thread(target=self._look, daemon=True, name=f"stratagem-{name}")
        self._thread.start()

    def signalled(self, number: int) -> None:
        """Tell all ranks of a signal to this rank."""
        self._signal = signal.Signals(number).name
        self._wake.put(None)

    def _look(self) -> None:
        while not self._over:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self.look_every_s if self.world_size > 1 else None)
            with contextlib.suppress(Exception):  # the store is gone when training has ended elsewhere
                if self._signal and self._read("stop") is None:
                    self._post("stop", f"{self._signal} to rank {self.rank}")
                if self._read("stop") is not None:
                    self._answer()
                    return

    def _answer(self) -> None:
        self.requested = True  # before the number is posted: see the note
        if self.on_request is not None:
            self.on_request()
        self._post(f"begun/{self.rank}", str(self.begun if self.number_begun is None else self.number_begun()))
        if self.after_post is not None:
            self.after_post()

    def last_batch(self) -> int:
        """Return the number of the last batch for all ranks; wait for the numbers of all ranks."""
        deadline = time.monotonic() + self.patience_s
        while self._last is None:
            posts = [self._read(f"begun/{rank}") for rank in range(self.world_size)]
            if None not in posts:
                self._last = max(int(post) for post in posts if post is not None)
            elif time.monotonic() > deadline:
                raise PeerError(
                    f"rank {posts.index(None)} did not answer within {self.patience_s:.0f} s of {self.reason()}",
                    do="this rank stops without saving",
                )
            else:
                time.sleep(0.01)
        return self._last

    def post_no_limit(self) -> None:
        """Write that this rank has trained all batches, so that no rank stops before that."""
        with contextlib.suppress(Exception):
            self._post(f"begun/{self.rank}", str(_NO_LIMIT))

    def reason(self) -> str:
        """Return the signal that stopped training, and the rank that received it."""
        return str(self._read("stop"))

    def stop(self) -> None:
        """End the thread."""
        self._over = True
        self._wake.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)  # it may be blocked in a request to a store that is gone

    def _read(self, key: str) -> str | None:
        text: str | None = self.store.get(f"{self.name}/{key}")
        return text

    def _post(self, key: str, text: str) -> None:
        self.store.put(f"{self.name}/{key}", text)
