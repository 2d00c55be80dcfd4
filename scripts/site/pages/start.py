"""The start page: the beginning of the README, and where to read on."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from pages.text import required

#: The heading of the README before which the start page ends.
END = "## Demo and tests"
#: The section of the README whose parts are tabs on the start page.
_TABS = re.compile(r"(?<=^## Install\n)(.*?)(?=^## )", re.DOTALL | re.MULTILINE)


def page(root: Path, nav: list[Any]) -> str:
    """Return the page."""
    text, end, _ = (root / "README.md").read_text().partition(END)
    assert end, f"README.md has no heading {END!r}"
    parts = [_TABS.sub(_as_tabs, text.replace("](docs/", "](")), "## Where to read on\n"]
    for item in nav:
        for part, pages in item.items():
            entries = [_line(root, title, path) for title, path in _pages(pages) if not _is_of_a_list(path)]
            parts += [f"### {part}\n", *entries, ""]
    return "\n".join(parts)


def _as_tabs(section: re.Match[str]) -> str:
    """Return a section with each part below a heading as a tab."""
    before, *parts = section[1].split("\n### ")
    tabs = [part.partition("\n") for part in parts]
    return before + "".join(f'\n=== "{title}"\n{textwrap.indent(text, "    ")}' for title, _, text in tabs) + "\n"


def _is_of_a_list(path: str) -> bool:
    """Whether the page is found through a list that has a page of its own."""
    return path == "index.md" or (path.startswith("decisions/") and path != "decisions/README.md")


def _pages(item: Any, title: str = "") -> list[tuple[str, str]]:
    """Return title and path of the pages of a part of the navigation; "" for a page with its own title."""
    if isinstance(item, str):
        return [(title, item)]
    if isinstance(item, list):
        return [page for each in item for page in _pages(each)]
    return [page for name, value in item.items() for page in _pages(value, name)]


def _line(root: Path, title: str, path: str) -> str:
    """Return the list item of a page: its title, and the first sentence of a page that is not generated."""
    source = root / "docs" / path
    if not source.exists():
        return f"* [{title}]({path})"
    heading, _, rest = source.read_text().partition("\n")
    paragraph = next((part for part in re.split(r"\n\s*\n", rest.strip()) if part), "")
    sentence = re.split(r"(?<=[.:])\s", required(paragraph, path))[0].rstrip(":.")
    return f"* [{title or heading.removeprefix('# ')}]({path}): {sentence[0].lower() + sentence[1:]}"
