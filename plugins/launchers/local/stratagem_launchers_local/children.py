"""Processes that this one started: whether they run, and how to end them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable

from attrs import define

#: How long a process may take to end when told to.
END_S = 5.0


@define(eq=False)
class Child:
    """A process on this machine."""

    rank: int
    pid: int
    #: Return its exit code, negative for a signal; None while it runs.
    poll: Callable[[], int | None]
    #: The parent made it end.
    was_ended: bool = False


def end(children: Iterable[Child]) -> None:
    """Ask `children` to end, then make them; return when they have."""
    for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        running = [child for child in children if child.poll() is None]
        for child in running:
            child.was_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
        wait_until(functools.partial(_are_over, running), patience)


def _are_over(children: list[Child]) -> bool:
    return all(child.poll() is not None for child in children)


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for `condition`; return False if it does not hold within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
