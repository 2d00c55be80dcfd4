"""What a process that a launcher started does for it: end when the launcher ends, and report the error that ends it.

The launcher's side is the launcher's own. It tells a process of these by the variables of `process_variables`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.distributed.reports import left, report
from stratagem.errors import LaunchError

_PR_SET_PDEATHSIG = 1


# --- Beside the processes that this one launched -----------------------------------------------------------------


class LaunchedBeside(Protocol):
    """The processes that a launcher started beside this one, which is one of the ranks."""

    @property
    def interrupted_us(self) -> bool:
        """Whether the main thread was interrupted because one of them failed."""

    @property
    def were_ended(self) -> bool:
        """Whether they were ended after an error."""


_beside: LaunchedBeside | None = None


def set_beside(processes: LaunchedBeside) -> None:
    """Called by a launcher whose own process is one of the ranks, once it has started the others."""
    global _beside
    _beside = processes


def interrupted_by_launcher() -> bool:
    """Whether a KeyboardInterrupt tells of another process of this node that failed, rather than of Ctrl-C."""
    return _beside is not None and _beside.interrupted_us


# --- In a process that was launched ------------------------------------------------------------------------------


def report_to_launcher() -> None:
    """In a process that a launcher started by running the program again: report what ends it, rather than print it.

    Raises:
        LaunchError: this process launched the others, and they were ended after an error that the program caught.
    """
    if _beside is not None and _beside.were_ended:
        raise LaunchError(
            "the other processes of this program were ended after an error",
            expected="all of them to be there",
            do="start the program again, or use a strategy that forks: it starts new processes for every call",
        )
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is None or os.environ.get(PARENT_VARIABLE) == str(os.getpid()) or sys.excepthook is _report_and_exit:
        return
    sys.excepthook = _report_and_exit
    atexit.register(left(Path(folder), int(os.environ["RANK"])).touch)  # runs after what is registered later
    if sys.platform != "linux":  # elsewhere the launcher had the kernel told before the program began
        die_with(int(os.environ[PARENT_VARIABLE]))


def _report_and_exit(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    folder = Path(os.environ[REPORTS_VARIABLE])
    if isinstance(error, KeyboardInterrupt):
        return
    if folder.exists():
        report(error, int(os.environ.get("RANK", "0")), folder)
    else:
        sys.__excepthook__(kind, error, trace)


def die_with(parent: int) -> None:
    """End this process when `parent` ends, however that ends.

    To the kernel the parent is the *thread* that started this process. A process that forks calls `libc` first.
    """
    if sys.platform == "linux":
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the kernel knew
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library; loaded before a fork, as the loader's lock may be held by a thread that the fork does not copy."""
    return ctypes.CDLL(None)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
