"""Read the error reports of processes, and find the root cause among them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from stratagem import errors
from stratagem.errors import LaunchError, PeerError, StratagemError
from stratagem_evidence import INTERRUPTED, RankEvidence, ask_for_stacks, keep, read_all, verdict

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


def left(folder: Path, rank: int) -> Path:
    """Return the path of the file that a process creates when its program has ended and only cleanup remains."""
    return folder / f"{rank}.left"


def observed(folder: Path, children: Iterable[Child]) -> dict[int, RankEvidence]:
    """Return what is known of all ranks, after one has failed and before the launcher ends those that still run."""
    ask_for_stacks(folder, [(child.rank, child.pid) for child in children if child.poll() is None])
    return read_all(folder)


def root_cause(
    folder: Path, children: Iterable[Child], evidence: dict[int, RankEvidence], echo: Iterable[int] = ()
) -> StratagemError | None:
    """Return the root cause as an error, from reports, exit codes and what was `observed`; None if no process failed.

    Args:
        echo: ranks, other than `children`, whose error was caused by another one.
    """
    reports = sorted((read_report(path) for path in folder.glob("*.json")), key=lambda report: report.time)
    roots = [found for found in reports if not found.is_echo]
    _complete(evidence, {*echo, *(found.rank for found in reports)}, folder, children)
    differ = verdict(evidence, ("differ",)) if not roots or roots[0].parts else None
    if roots and differ is None:
        return as_error(roots[0])
    # Where no process ended silently, ranks that waited in vain have looked around, and know what the others did.
    found = differ or verdict(evidence)
    if reports and reports[0].type == PeerError.__name__ and differ is None:
        ended = verdict(evidence, ("ended", "aborted")) is not None
        found = found if ended and found is not None and found.ranks else None
    cause = LaunchError(found.found, do=found.do) if found else as_error(reports[0]) if reports else None
    if cause is not None:
        keep(folder, evidence, cause)
    return cause


def _complete(evidence: dict[int, RankEvidence], reported: set[int], folder: Path, children: Iterable[Child]) -> None:
    """Add to the `evidence` how the processes ended, and which of them only followed another."""
    for child in children:
        known = evidence.setdefault(child.rank, RankEvidence(rank=child.rank, process=child.pid))
        known.ending = None if child.was_ended else child.poll()
        known.is_over = left(folder, child.rank).exists()
        known.has_own_error &= known.ending not in INTERRUPTED  # nobody reports that
    for rank in reported & evidence.keys():
        evidence[rank].is_echo = True


def read_report(path: Path) -> Report:
    return Report(**json.loads(path.read_text()))


def as_error(found: Report) -> StratagemError:
    """Return the reported error: of its own class if it is one of stratagem's. Its note has the traceback."""
    note = f"on rank {found.rank}:\n{found.traceback.rstrip()}"
    cls = getattr(errors, found.type, None)
    if found.parts and isinstance(cls, type):
        error: StratagemError = cls(found.parts["found"], expected=found.parts["expected"], do=found.parts["do"])
    else:
        message = found.message.rstrip(".")
        error = LaunchError(f"rank {found.rank} failed with {found.type}: {message}", do="its traceback is below")
    error.add_note(note)
    return error
