"""The list of decisions: why things are as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INTRODUCTION = """# Decisions

Why things are as they are: each page says what was found, what was decided, and what it costs.
"""

#: The folder in the navigation that its pages replace.
FOLDER = "decisions/"


def page(root: Path) -> str:
    """Return the list of all decisions."""
    items = [f"* [{title}]({path.name})" for path, title in _titles(root)]
    return "\n".join([INTRODUCTION, *items]) + "\n"


def with_pages(nav: list[Any], root: Path) -> list[Any]:
    """Return `nav` with the pages of the decisions where the folder is named."""
    if isinstance(nav, list):
        return [each for item in nav for each in (_pages(root) if item == FOLDER else [_inside(item, root)])]
    return nav


def _inside(item: Any, root: Path) -> Any:
    return {title: with_pages(value, root) for title, value in item.items()} if isinstance(item, dict) else item


def _pages(root: Path) -> list[Any]:
    return ["decisions/index.md", *({title: f"decisions/{path.name}"} for path, title in _titles(root))]


def _titles(root: Path) -> list[tuple[Path, str]]:
    paths = sorted((root / "docs" / "decisions").glob("*.md"))
    return [(path, path.read_text().partition("\n")[0].removeprefix("# ")) for path in paths]
