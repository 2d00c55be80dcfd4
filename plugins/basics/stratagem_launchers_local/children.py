"""Child processes: tell them their places, check whether they run, and end them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from attrs import define, evolve

from stratagem.api import World
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE, process_variables

#: Seconds that a process has to end after SIGTERM, and after SIGKILL.
END_S = 5.0


def local_places(world: World) -> list[World]:
    """Return the `World` of each process of this node, given that of local rank 0."""
    return [evolve(world, rank=world.rank + offset, local_rank=offset) for offset in range(world.local_world_size)]


def child_environment(world: World, reports: Path) -> dict[str, str]:
    """Return the complete environment for a process with the ranks of `world`."""
    threads = max(1, (os.cpu_count() or 1) // world.local_world_size)
    return {
        "OMP_NUM_THREADS": str(threads), **os.environ, **process_variables(world),
        PARENT_VARIABLE: str(os.getpid()), REPORTS_VARIABLE: str(reports),
    }  # fmt: skip


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
