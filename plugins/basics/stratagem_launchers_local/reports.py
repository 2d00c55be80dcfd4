"""Read the error reports of processes, and find the root cause among them."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from stratagem import errors
from stratagem.errors import LaunchError, StratagemError

if TYPE_CHECKING:
    from stratagem_launchers_local.children import Child


@frozen
class Report:
    """The error report of a process."""

    rank: int
    time: float
    type: str
    message: str
    traceback: str
    #: The parts of a StratagemError, so that the parent can raise the same.
    parts: dict[str, str]
    #: Whether the error is only a consequence of another process's failure; see `is_echo`.
    is_echo: bool


def reports_folder() -> Path:
    """Return a new folder for reports and results, readable by this user only."""
    return Path(tempfile.mkdtemp(prefix="stratagem-"))


def root_cause(folder: Path, children: Iterable[Child]) -> StratagemError | None:
    """Return the root cause as an error, from the reports and the exit codes; None if no process failed."""
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
