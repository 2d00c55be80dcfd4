"""The error report that a process writes for its launcher before it ends."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from pathlib import Path

from stratagem.api.paths import replace_text
from stratagem.api.peer_errors import is_echo
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.distributed.standard_streams import flush_files
from stratagem.errors import StratagemError


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
