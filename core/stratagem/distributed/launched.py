"""What a launched process does for its launcher: end when that one ends, and report the error that ends it."""

from __future__ import annotations

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
from pathlib import Path

from stratagem.api.paths import replace_text
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.distributed.standard_streams import flush_files
from stratagem.errors import StratagemError, is_echo

_PR_SET_PDEATHSIG = 1
#: Set when the launcher in this process interrupts it since a launched one failed: the KeyboardInterrupt is not Ctrl-C.
interrupted_by_launcher = threading.Event()


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
