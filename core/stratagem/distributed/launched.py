"""What a launched process must do: end when its launcher ends, and report the error that ends it.

The launcher asks for both with the environment variables of `process_variables`. Its own part is in the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stratagem.api.paths import replace_text
from stratagem.api.peer_errors import is_echo
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.distributed.standard_streams import flush_files
from stratagem.distributed.uncaught_errors import listen
from stratagem.errors import LaunchError, StratagemError

_PR_SET_PDEATHSIG = 1


# --- In a rank that launched the others --------------------------------------------------------------------------


class LaunchedBeside(Protocol):
    """The processes that the launcher in this process started; this process is one of the ranks, too."""

    @property
    def interrupted_us(self) -> bool:
        """Whether the launcher interrupted the main thread because one of the processes failed."""

    @property
    def were_ended(self) -> bool:
        """Whether the launcher ended the processes after an error."""


_beside: LaunchedBeside | None = None


def set_beside(processes: LaunchedBeside) -> None:
    """Register the `processes` that a launcher in this process has started; for launchers with `parent_trains`."""
    global _beside
    _beside = processes


def interrupted_by_launcher() -> bool:
    """Whether a KeyboardInterrupt was caused by a failed process of this node, rather than by Ctrl-C."""
    return _beside is not None and _beside.interrupted_us


# --- In a process that was launched ------------------------------------------------------------------------------


def report_to_launcher() -> None:
    """Report an uncaught error to the launcher instead of printing it, if a launcher ran this program again.

    Raises:
        LaunchError: this process launched the others, and they were ended after an error that the program caught.
    """
    if _beside is not None and _beside.were_ended:
        raise LaunchError(
            "the other processes of this program were ended after an error",
            expected="all of them to be running",
            do="start the program again, or use a strategy that forks: it starts new processes for every call",
        )
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is None or os.environ.get(PARENT_VARIABLE) == str(os.getpid()):
        return
    listen(_report_uncaught)
    atexit.register(left(Path(folder), int(os.environ["RANK"])).touch)  # runs after what is registered later
    if sys.platform != "linux":  # on Linux the launcher called prctl before the program began
        die_with(int(os.environ[PARENT_VARIABLE]))


def _report_uncaught(error: BaseException, _print_error: Callable[[], None]) -> None:
    if not isinstance(error, KeyboardInterrupt):
        tell_launcher(error, int(os.environ.get("RANK", "0")))


def report(error: BaseException, rank: int, folder: Path) -> None:
    """Write a report of `error` into `folder`, unless this process has written one already.

    Write open files before: the launcher may end this process as soon as it reads the report.
    """
    path = folder / f"{rank}.json"
    if path.exists():
        return
    with contextlib.suppress(MemoryError):  # the error may be that memory is short
        flush_files(on_disk=True)
    parts = {name: getattr(error, name) for name in ("found", "expected", "do") if isinstance(error, StratagemError)}
    content = {
        "rank": rank, "time": time.time(), "type": type(error).__name__, "message": str(error),
        "traceback": "".join(traceback.format_exception(error)), "parts": parts, "is_echo": is_echo(error),
    }  # fmt: skip
    with contextlib.suppress(OSError):
        replace_text(path, json.dumps(content))


def tell_launcher(error: BaseException, rank: int) -> None:
    """Write a report of `error` for the launcher of this process; without a launcher, print it."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is not None and os.path.isdir(folder) and os.environ.get(PARENT_VARIABLE) != str(os.getpid()):
        report(error, rank, Path(folder))
    else:
        traceback.print_exception(error)


def left(folder: Path, rank: int) -> Path:
    """Return the path of the file that a process creates when its program has ended and only cleanup remains."""
    return folder / f"{rank}.left"


def die_with(parent: int) -> None:
    """End this process when the process `parent` ends, for any reason.

    For the kernel the parent is the *thread* that started this process. Call `libc` before a fork.
    """
    if sys.platform == "linux":
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # `parent` ended before prctl was called
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library. Load it before a fork: another thread may hold the loader's lock during the fork."""
    return ctypes.CDLL(None)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
