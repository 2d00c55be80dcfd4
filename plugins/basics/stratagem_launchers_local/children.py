"""Child processes: check whether they run, and end them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable

from attrs import define

#: Seconds that a process has to end after SIGTERM, and after SIGKILL.
END_S = 5.0


@define(eq=False)
class Child:
    """A process that this one started."""

    rank: int
    pid: int
    #: Return its exit code, negative for a signal; None while it runs.
    poll: Callable[[], int | None]
    #: Whether the parent ended it.
    was_ended: bool = False


def end(children: Iterable[Child]) -> None:
    """End `children` with SIGTERM, then with SIGKILL; wait until they have ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if child.poll() is None]
        for child in running:
            child.was_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
        wait_until(functools.partial(_have_ended, running), END_S)


def _have_ended(children: list[Child]) -> bool:
    return all(child.poll() is not None for child in children)


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for `condition`; return False if it does not hold within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
