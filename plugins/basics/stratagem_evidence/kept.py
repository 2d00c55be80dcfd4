"""What a launcher keeps of a run that failed, for ``stratagem postmortem``."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from stratagem.errors import StratagemError
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


def read_kept(folder: Path) -> tuple[str, dict[int, RankEvidence]]:
    """Return the sentence that a run in `folder` ended with, "" if nothing tells, and what is known of its ranks."""
    known = read_all(folder)
    if (folder / _NAME).exists():
        facts = json.loads((folder / _NAME).read_text())
        for rank, fact in facts["ranks"].items():
            known.setdefault(int(rank), RankEvidence(rank=int(rank), process=0))
            known[int(rank)].ending, known[int(rank)].place = fact["ending"], fact["place"]
        return str(StratagemError(facts["found"], do=facts["do"])), known
    for told in known.values():
        told.is_gone = not (told.runs or told.was_told_to_end)
    found = verdict(known) if any(each.is_gone for each in known.values()) else None
    return "" if found is None else str(StratagemError(found.found, do=found.do)), known
