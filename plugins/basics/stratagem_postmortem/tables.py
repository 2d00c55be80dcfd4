"""What each rank did last, as text and as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict

from stratagem_evidence import RankEvidence, as_torch_recorded, by_group, signal_name
from stratagem_evidence.ring import Record


def as_data(sentence: str, known: Mapping[int, RankEvidence]) -> dict[str, Any]:
    """Return the verdict and all that is known of each rank, for JSON."""
    return {"verdict": sentence or None, "ranks": {str(rank): asdict(each) for rank, each in sorted(known.items())}}


def lines_of(sentence: str, known: Mapping[int, RankEvidence], last: int) -> Iterator[str]:
    """Yield the verdict, a table of the ranks, and the `last` collectives of each group side by side."""
    yield sentence or "the evidence does not tell which rank made this run end"
    yield ""
    yield f"{'rank':<6}{'process':<10}{'ended':<26}{'step':>8}{'batch':>8}  was in"
    for rank, process, ended, step, batch, place in rows(known):
        yield f"{rank:<6}{process:<10}{ended:<26}{step:>8}{batch:>8}  {place}"
    yield from (f"before: {told.note}" for _, told in sorted(known.items()) if told.note)
    for group, begun in [*sorted(by_group(known).items()), *sorted(by_group(as_torch_recorded(known)).items())]:
        yield ""
        yield f"collectives of ranks {group.partition('#')[0]}{' as torch recorded them' * group.endswith('(torch)')}"
        yield from _side_by_side(begun, last)


def rows(known: Mapping[int, RankEvidence]) -> Iterator[tuple[str, ...]]:
    """Yield rank, process, how it ended, step, batch, and the user's line or else the phase in which it was."""
    for rank, told in sorted(known.items()):
        step, batch = (told.phase.step, told.phase.batch) if told.phase else ("", "")
        place = told.place or (told.phase.name if told.phase else "")
        yield str(rank), str(told.process), _ending(told), str(step), str(batch), place


def _ending(told: RankEvidence) -> str:
    """Return how a process ended, in a few words."""
    code = told.ending
    if code is not None:
        return signal_name(-code) if code < 0 else f"exit code {code}"
    if told.has_own_error or told.is_echo:
        return "an error" if told.has_own_error else "an error of another rank"
    return "stopped" if told.is_stopped else "runs" if told.runs else "was ended"


def _side_by_side(begun: Mapping[int, Mapping[int, Record]], last: int) -> Iterator[str]:
    newest = max(max(records, default=0) for records in begun.values())
    for number in range(max(0, newest - last + 1), newest + 1):
        texts = {rank: str(records[number].site) if number in records else "-" for rank, records in begun.items()}
        if len(set(texts.values())) == 1:
            yield f"{number:>8}  all: {next(iter(texts.values()))}"
        else:
            yield from (f"{number:>8}  rank {rank}: {text}" for rank, text in sorted(texts.items()))
