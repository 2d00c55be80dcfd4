"""What the author of a strategy or of a callback reads does not grow: lines of code and of their documentation."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE, TRAINER = "core/stratagem/api", "plugins/trainer/stratagem_trainer/api"
KINDS = f"{CORE}/kinds.py"
#: By author: files, or ``file:Class``, and how many lines they have at most. The numbers may only be lowered.
READ = {
    "strategy": (
        [f"{CORE}/{name}.py" for name in ("hooks", "context", "world", "capabilities", "named_state")]
        + [f"{KINDS}:{name}" for name in ("Plugin", "Strategy", "PrecisionPolicy")],
        900,
    ),
    "callback": (
        [f"{TRAINER}/{name}.py" for name in ("trainer_view", "events", "kinds", "callback_log")]
        + [f"{CORE}/context.py", f"{KINDS}:Plugin"],
        810,
    ),
}


def lines_of(place: str) -> int:
    """Return how many lines a file has, or a class in it with its decorators."""
    path, _, name = place.partition(":")
    text = (ROOT / path).read_text()
    if not name:
        return len(text.splitlines())
    (found,) = (each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == name)
    return found.end_lineno - found.lineno + 1 + len(found.decorator_list)


@pytest.mark.parametrize("author", READ)
def test_an_author_reads_no_more(author):
    places, ceiling = READ[author]
    found = {place: lines_of(place) for place in places}

    assert sum(found.values()) <= ceiling, f"{sum(found.values())} lines, the ceiling is {ceiling}: {found}"
