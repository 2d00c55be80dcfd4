"""What garbage collection leaves."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import weakref


def still_there(references: list[weakref.ref[Any]], limit_s: float = 10) -> int:
    """Return how many of the objects remain.

    A thread of gloo holds the tensors of a collective call for a moment after the call has returned.
    """
    deadline = time.monotonic() + limit_s
    while True:
        gc.collect()
        count = sum(each() is not None for each in references)
        if count == 0 or time.monotonic() > deadline:
            return count
        time.sleep(0.01)
