"""What each rank did last, as text and as data."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict

from stratagem_evidence import RankEvidence


def as_data(sentence: str, known: Mapping[int, RankEvidence]) -> dict[str, Any]:
    """Return the verdict and all that is known of each rank, for JSON."""
    return {"verdict": sentence or None, "ranks": {str(rank): asdict(each) for rank, each in sorted(known.items())}}


def lines_of(sentence: str, known: Mapping[int, RankEvidence], last: int) -> Iterator[str]:
    """Yield the verdict, a table of the ranks, and the `last` collectives of each group side by side."""
    yield sentence or "the evidence does not tell which rank made this run end"
    yield ""
    yield f"{'rank':<6}{'process':<10}{'ended':<26}{'step':>8}{'batch':>8}  was in"
    for rank, each in sorted(known.items()):
        step, batch = (f"{each.phase.step}", f"{each.phase.batch}") if each.phase else ("", "")
        yield f"{rank:<6}{each.process:<10}{ending(each):<26}{step:>8}{batch:>8}  {doing(each)}"
    for group in sorted({record.site.group for each in known.values() for record in each.records}):
        yield ""
        yield from _side_by_side(group, known, last)


def ending(told: RankEvidence) -> str:
    """Return how a process ended, in a few words."""
    code = told.ending
    if code is not None:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if told.has_own_error or told.is_echo:
        return "an error" if told.has_own_error else "an error of another rank"
    return "stopped" if told.is_stopped else "runs" if told.runs else "was ended"


def doing(told: RankEvidence) -> str:
    """Return the user's line or else the phase in which a process was."""
    return told.place or (told.phase.name if told.phase else "")


def _side_by_side(group: str, known: Mapping[int, RankEvidence], last: int) -> Iterator[str]:
    begun = {
        rank: {record.number: str(record.site) for record in each.records if record.site.group == group}
        for rank, each in sorted(known.items())
    }
    begun = {
        rank: records for rank, records in begun.items() if records or str(rank) in group.partition("#")[0].split(",")
    }
    yield f"collectives of ranks {group.partition('#')[0]}"
    newest = max(max(records, default=0) for records in begun.values())
    for number in range(max(0, newest - last + 1), newest + 1):
        texts = {rank: records.get(number, "-") for rank, records in begun.items()}
        if len(set(texts.values())) == 1:
            yield f"{number:>8}  all: {next(iter(texts.values()))}"
        else:
            yield from (f"{number:>8}  rank {rank}: {text}" for rank, text in texts.items())
