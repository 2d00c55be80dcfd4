"""Links from the tables of `docs/plugins.md` to the sections of the reference."""

from __future__ import annotations

import re
from pathlib import Path

from pages.plugins import TITLES, addresses

_NAME = re.compile(r"`([\w-]+)`")
#: Headings under which the tables have no column for the kind.
_KINDS = {title: kind for kind, title in TITLES.items()}


def with_links(markdown: str, root: Path) -> str:
    """Return the page with the names of plugins in its tables as links."""
    known = addresses(root)
    kind, lines = "", []
    for line in markdown.splitlines():
        if line.startswith("## "):
            kind = _KINDS.get(line.removeprefix("## "), "")
        lines.append(_linked(line, kind, known) if line.startswith("| ") else line)
    return "\n".join(lines)


def _linked(row: str, kind: str, known: dict[tuple[str, str], str]) -> str:
    """Return a row with links in the cell of the names: the first one, or the one after the kind."""
    cells = row.split(" | ")
    number = 0 if kind else 1
    kind = kind or cells[0].removeprefix("| ")
    if number >= len(cells):
        return row

    def link(match: re.Match[str]) -> str:
        if (kind, match[1]) not in known:
            return match[0]
        return f"[{match[0]}]({known[kind, match[1]]})"

    cells[number] = _NAME.sub(link, cells[number])
    return " | ".join(cells)
