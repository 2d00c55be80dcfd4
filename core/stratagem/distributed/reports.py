"""What a process reports before it ends, and which of several reports is the cause."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from stratagem import errors
from stratagem.api.peer_errors import is_echo
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.errors import LaunchError, StratagemError

if TYPE_CHECKING:
    from stratagem.distributed.children import Child


# --- Reports -----------------------------------------------------------------------------------------------------


@frozen
class Report:
    """What a process said before it ended."""

    rank: int
    time: float
    type: str
    message: str
    traceback: str
    #: The parts of a StratagemError, so that the parent can raise the same.
    parts: dict[str, str]
    #: It only tells that a collective failed, which another process caused; see `is_echo`.
    is_echo: bool


def report(error: BaseException, rank: int, folder: Path) -> None:
    """Leave the report of `error`; the first one of a process stands."""
    path = folder / f"{rank}.json"
    if path.exists():
        return
    parts = {}
    if isinstance(error, StratagemError):
        parts = {"found": error.found, "expected": error.expected, "do": error.do}
    content = {
        "rank": rank, "time": time.time(), "type": type(error).__name__, "message": str(error),
        "traceback": "".join(traceback.format_exception(error)), "parts": parts, "is_echo": is_echo(error),
    }  # fmt: skip
    with contextlib.suppress(OSError):
        staged = path.with_suffix(".staged")
        staged.write_text(json.dumps(content))
        staged.rename(path)


def tell_launcher(error: BaseException, rank: int) -> None:
    """Leave the report of `error` for the launcher of this process, or print it where there is none to read it."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is not None and os.path.isdir(folder) and os.environ.get(PARENT_VARIABLE) != str(os.getpid()):
        report(error, rank, Path(folder))
    else:
        traceback.print_exception(error)


def root_cause(folder: Path, children: Iterable[Child]) -> StratagemError | None:
    """Return the error to show for what happened, made from the reports and the exit codes; None if nothing did."""
    reports = sorted((read_report(path) for path in folder.glob("*.json")), key=lambda report: report.time)
    known = {found.rank for found in reports}
    silent = [c for c in children if c.poll() not in (None, 0) and not c.was_ended and c.rank not in known]
    roots = [found for found in reports if not found.is_echo]
    if roots:
        return _as_error(roots[0])
    if silent:
        child = silent[0]
        return LaunchError(
            f"rank {child.rank} {_ending(child.poll())} and left no error report",
            do="check its stderr, and the kernel log for an out-of-memory kill",
        )
    return _as_error(reports[0]) if reports else None


def read_report(path: Path) -> Report:
    return Report(**json.loads(path.read_text()))


def _as_error(found: Report) -> StratagemError:
    note = f"on rank {found.rank}:\n{found.traceback.rstrip()}"
    cls = getattr(errors, found.type, None)
    if found.parts and isinstance(cls, type):
        error: StratagemError = cls(found.parts["found"], expected=found.parts["expected"], do=found.parts["do"])
    else:
        error = LaunchError(f"rank {found.rank} failed with {found.type}: {found.message}", do="its traceback is below")
    error.add_note(note)
    return error


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def reports_folder() -> Path:
    """Return a new folder for reports and results, readable by this user alone."""
    return Path(tempfile.mkdtemp(prefix="stratagem-"))
