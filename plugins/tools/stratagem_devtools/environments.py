"""Which environment ``environment="auto"`` would choose in this process, and why not the others."""

from __future__ import annotations

from typing import Any

from stratagem.errors import StratagemError
from stratagem.stack.detection import Candidate, choose, environment_candidates


def examine_environments() -> dict[str, Any]:
    """Return the choice, the problem if there is one, and a row for each installed environment."""
    candidates = environment_candidates()
    try:
        chosen, problem = choose(candidates), ""
    except StratagemError as error:
        chosen, problem = None, str(error)
    problem = problem or _refusal(chosen)
    broken = [f"environment {each.entry.name!r}: {each.problem}" for each in candidates if each.problem]
    return {
        "chosen": None if chosen is None else chosen.entry.name,
        "problems": [*([problem] if problem else []), *broken],
        "candidates": [_row(candidate, chosen) for candidate in candidates],
    }


def render_environments(found: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    lines = ['environments (what environment="auto" chooses here):']
    for row in found["candidates"]:
        if row["confidence"] is None:
            lines.append(f"  {row['name']}: not present ({row['why not']})")
            continue
        why = f"; not chosen: {row['why not']}" if row["why not"] else ""
        chosen = "chosen, " if row["name"] == found["chosen"] else ""
        lines.append(f"  {row['name']}: {chosen}{row['confidence']} ({row['evidence']}){why}")
    return lines


def _row(candidate: Candidate, chosen: Candidate | None) -> dict[str, Any]:
    evidence = candidate.evidence
    return {
        "name": candidate.entry.name,
        "confidence": None if evidence is None else str(evidence.confidence),
        "evidence": None if evidence is None else evidence.reason,
        "why not": "" if candidate is chosen else why_not(candidate, chosen),
    }


def why_not(loser: Candidate, winner: Candidate | None) -> str:
    """Return why `winner` is used and not `loser`, or why none is."""
    if loser.evidence is None:
        return loser.problem or "none of its variables is set"
    if winner is None or winner.evidence is None:
        return "it contradicts another one"
    mine, theirs = loser.evidence.confidence, winner.evidence.confidence
    if mine != theirs:
        return f"{winner.entry.name} is {theirs}, and this one is {mine}"
    if loser.plugin.precedence < winner.plugin.precedence:
        ranks = f"precedence {winner.plugin.precedence} to {loser.plugin.precedence}"
        return f"{winner.entry.name} is started within it ({ranks})"
    return f"it agrees with {winner.entry.name}"


def _refusal(chosen: Candidate | None) -> str:
    """Return why the chosen environment would refuse to start a run, as far as its variables tell; "" if nothing."""
    try:
        if chosen is not None:
            chosen.plugin.local_processes()
            chosen.plugin.num_nodes()
    except StratagemError as error:
        return str(error)
    return ""
