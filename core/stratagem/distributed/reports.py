"""What a process reports before it ends, and which of several reports is the cause."""

from __future__ import annotations

import contextlib
import dis
import json
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from stratagem import errors
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.errors import LaunchError, StratagemError

if TYPE_CHECKING:
    from stratagem.distributed.children import Child


#: What gloo, NCCL and the store say when the other side is gone. Whole words: "cannot restore" is somebody's own error.
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|\bsocket|remote process exited|timed out waiting"
    r"|application timeout|operation timeout|\b(work)?nccl|recvvalue failed|\b(tcp|file|hash|prefix)?store\b"
)


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


def is_echo(error: BaseException) -> bool:
    """Whether `error` comes from a collective that failed because of another process.

    gloo and the store raise a plain RuntimeError from C++. One that Python code raised, outside torch.distributed and
    stratagem, is the user's own, whatever it says; so is every OSError (a data loader's, an HTTP client's).
    """
    if isinstance(error, OSError):
        return False
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if kinds & {"PeerError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return type(error) is RuntimeError and _ECHO.search(str(error).lower()) is not None and not _is_users(error)


def _is_users(error: BaseException) -> bool:
    """Whether a ``raise`` statement outside torch.distributed and stratagem raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and not re.match(r"(torch\.distributed|stratagem\w*)(\.|$)", module)


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
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def reports_folder() -> Path:
    """Return a new folder for reports and results, readable by this user alone."""
    return Path(tempfile.mkdtemp(prefix="stratagem-"))
