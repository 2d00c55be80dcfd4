"""What a launcher keeps of a run that failed, for ``stratagem postmortem``."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from stratagem.errors import LaunchError, StratagemError
from stratagem_evidence.rank_evidence import RankEvidence, read_all
from stratagem_evidence.rules import verdict

_NAME = "verdict.json"


def keep(folder: Path, known: Mapping[int, RankEvidence], cause: StratagemError) -> None:
    """Write into `folder` what ended the run and how the processes ended, and tell with `cause` how to see that."""
    if not any(folder.glob("*.ring")):
        return
    facts = {
        "found": cause.found, "do": cause.do,
        "ranks": {str(rank): {"ending": each.ending, "place": each.place} for rank, each in known.items()},
    }  # fmt: skip
    with contextlib.suppress(OSError):
        (folder / _NAME).write_text(json.dumps(facts))
        cause.add_note(f"`stratagem postmortem {folder}` shows what each rank did last")


def clear(folder: Path) -> None:
    """Delete a launcher's `folder`, unless something was kept there."""
    if not (folder / _NAME).exists():
        shutil.rmtree(folder, ignore_errors=True)


def tell(name: str, rank: int, saw_sigterm: bool) -> None:
    """Print why `rank`, which launched all others, was ended by a signal, from what it left in the folder `name`.

    Args:
        saw_sigterm: it would have left word of SIGTERM, which somebody sends to end the run.
    """
    folder = Path(name)
    known = read_all(folder)
    mine = known.get(rank)
    if mine is None or mine.was_told_to_end or mine.has_own_error or mine.is_over or not (saw_sigterm or mine.ending):
        clear(folder)
        return
    for told in known.values():
        told.is_gone = told.rank == rank
        told.is_echo = told.rank != rank  # the kernel has ended it with that one
    found = verdict(known)
    assert found is not None, "a rank is gone"
    cause = LaunchError(found.found, do=found.do)
    keep(folder, known, cause)
    print(in_words(str(cause), folder), file=sys.stderr, flush=True)


def in_words(sentence: str, folder: Path) -> str:
    """Return the lines in which a process that raises no error prints a verdict."""
    return f"stratagem: {sentence}\n`stratagem postmortem {folder}` shows what each rank did last"


def read_kept(folder: Path) -> tuple[str, dict[int, RankEvidence]]:
    """Return the sentence that a run in `folder` ended with, "" if nothing tells, and what is known of its ranks."""
    known = read_all(folder)
    with contextlib.suppress(OSError, ValueError):  # there is none, or the disk was full
        facts = json.loads((folder / _NAME).read_text())
        for rank, fact in facts["ranks"].items():
            known.setdefault(int(rank), RankEvidence(rank=int(rank), process=0))
            known[int(rank)].ending, known[int(rank)].place = fact["ending"], fact["place"]
        return str(StratagemError(facts["found"], do=facts["do"])), known
    return judged(known), known


def judged(known: Mapping[int, RankEvidence]) -> str:
    """Return why a run failed one of whose processes is not there any more, "" if all are, or nothing tells."""
    for told in known.values():
        told.is_gone |= not (told.runs or told.was_told_to_end or told.is_over)
    # Of processes that something has ended together, as the end of their launcher does, none is at fault for that.
    together = all(each.is_gone and each.ending is None for each in known.values())
    gone = any(each.is_gone for each in known.values())
    found = verdict(known, ("differ",) if together else ()) if gone else None
    return "" if found is None else str(StratagemError(found.found, do=found.do))
