"""Move the fragments of docs/changes into CHANGELOG.md, as one section for a version: `make changelog VERSION=0.1.0`.

    python scripts/changelog.py VERSION [--draft]

A fragment is a file ``<id>.<added|changed|fixed|removed>.md``: a list of ``*`` items, or paragraphs, each of which
becomes an item. Items are in the order of the ids. --draft prints the section and changes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("added", "changed", "fixed", "removed")
TITLE = "# Changelog\n"
_NAME = re.compile(rf"(?P<id>\w+)\.(?P<kind>{'|'.join(KINDS)})\.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="the version that pyproject.toml has")
    parser.add_argument("--draft", action="store_true", help="print the section, and change nothing")
    arguments = parser.parse_args()
    if arguments.draft:
        print(section(ROOT, arguments.version, datetime.date.today()), end="")
    else:
        release(ROOT, arguments.version, datetime.date.today())


def release(root: Path, version: str, day: datetime.date) -> None:
    """Write the section of `version` at the top of CHANGELOG.md, then delete its fragments."""
    text, paths = section(root, version, day), fragments(root)
    changelog = root / "CHANGELOG.md"
    before = changelog.read_text().removeprefix(TITLE) if changelog.exists() else ""
    if f"\n## {version} " in before:
        raise SystemExit(f"CHANGELOG.md has {version} already; expected a new version; set it in pyproject.toml")
    changelog.write_text(f"{TITLE}\n{text}{before}")
    for path in paths:
        path.unlink()
    print(f"CHANGELOG.md: {version}, from {len(paths)} files of docs/changes")


def section(root: Path, version: str, day: datetime.date) -> str:
    """Return the text of a version: a heading, and the items of each kind."""
    expected = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if version != expected:
        raise SystemExit(
            f"VERSION is {version!r}; expected {expected!r}, as in pyproject.toml; pass that, or change both"
        )
    paths = fragments(root)
    if not paths:
        raise SystemExit("docs/changes is empty; expected a file for each change; there is nothing to release")
    return f"## {version} ({day})\n\n{by_kind(paths)}"


def by_kind(paths: Sequence[Path]) -> str:
    """Return the items of fragments under a heading for each kind."""
    parts = []
    for kind in KINDS:
        lines = [item for path in paths if path.name.endswith(f".{kind}.md") for item in items(path.read_text())]
        if lines:
            parts.append(f"### {kind.capitalize()}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def fragments(root: Path) -> list[Path]:
    """Return the fragments in the order of their ids; a file with another name is refused."""
    paths = sorted((root / "docs" / "changes").glob("*"), key=lambda path: path.name)
    if wrong := [path.name for path in paths if not _NAME.fullmatch(path.name)]:
        raise SystemExit(
            f"docs/changes has {', '.join(wrong)}; expected <id>.<{'|'.join(KINDS)}>.md; rename or remove other files"
        )
    return paths


def items(text: str) -> Iterator[str]:
    """Yield the items of a fragment, each as a list item of Markdown."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\* )", text.strip()):
        lines = [line.strip() for line in paragraph.removeprefix("* ").splitlines()]
        yield "* " + "\n  ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
