"""The list of decisions: why things are as they are.

    python scripts/site/pages/decisions.py

Writes `docs/decisions/README.md`. A decision that does not hold any more names the later one in its second paragraph:
``Replaced by [0046](...)``, or ``In part replaced by [0046](...): what``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

INTRODUCTION = """# Decisions

Why things are as they are, for what binds the whole: each page says what was found, what was decided, what else was
considered, and what follows. What binds one package is in the section "Decisions" of its README in `plugins/`.

| number | title | status |
|---|---|---|
"""

#: The folder in the navigation that its pages replace.
FOLDER = "decisions/"
_LIST = "README.md"
_REPLACED = re.compile(r"(?:In part r|R)eplaced by \[\d{4}\]\([^)]+\)")


def page(root: Path) -> str:
    """Return the list of all decisions."""
    rows = [f"| {path.name[:4]} | [{title[6:]}]({path.name}) | {_status(path)} |\n" for path, title in _titles(root)]
    return INTRODUCTION + "".join(rows)


def with_pages(nav: list[Any], root: Path) -> list[Any]:
    """Return `nav` with the pages of the decisions where the folder is named."""
    if isinstance(nav, list):
        return [each for item in nav for each in (_pages(root) if item == FOLDER else [_inside(item, root)])]
    return nav


def _inside(item: Any, root: Path) -> Any:
    return {title: with_pages(value, root) for title, value in item.items()} if isinstance(item, dict) else item


def _pages(root: Path) -> list[Any]:
    return [FOLDER + _LIST, *({title: FOLDER + path.name} for path, title in _titles(root))]


def _titles(root: Path) -> list[tuple[Path, str]]:
    paths = sorted((root / "docs" / "decisions").glob("[0-9]*.md"))
    return [(path, path.read_text().partition("\n")[0].removeprefix("# ")) for path in paths]


def _status(path: Path) -> str:
    replaced = _REPLACED.match(path.read_text().split("\n\n")[1])
    return replaced[0][0].lower() + replaced[0][1:] if replaced else "holds"


if __name__ == "__main__":
    repository = Path(__file__).parents[3]
    (repository / "docs" / FOLDER / _LIST).write_text(page(repository))
