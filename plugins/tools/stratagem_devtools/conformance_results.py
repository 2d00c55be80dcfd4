"""What a package states of its plugins: results of the conformance kit, in its README, which every wheel carries.

An author writes the table with ``stratagem plugins check NAME --write README.md`` before the package is built. The page
of a package index shows it, and `stratagem plugins list` reads it from the metadata of the installed package.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.discovery.registry import Entry
from stratagem.errors import StratagemError

_HEADING = "## Conformance"
_TABLE = f"""{_HEADING}

Checks of stratagem's conformance kit:

| plugin | version | result | with | date |
|---|---|---|---|---|
"""
_ROW = re.compile(r"^\| (\w+) `([^`]+)` \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)


def write(readme: Path, entry: Entry, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the result of `rows`, one for each check, into `readme`, in place of an earlier one of that plugin.

    Raises:
        StratagemError: a check failed.
    """
    counts = Counter(row["outcome"] for row in rows)
    if not counts["passed"] or counts["failed"]:
        raise StratagemError(f"{counts['failed']} checks failed, so {readme} stays as it is")
    text = readme.read_text(encoding="utf-8")
    row = _row(entry, counts)
    earlier = re.compile(rf"^\| {entry.kind} `{re.escape(entry.name)}` \|.*\n", re.MULTILINE)
    if earlier.search(text):
        text = earlier.sub(lambda _: row, text)
    elif _TABLE in text:
        text = text.replace(_TABLE, _TABLE + row)
    else:
        text = f"{text.rstrip()}\n\n{_TABLE}{row}"
    readme.write_text(text, encoding="utf-8")


def _row(entry: Entry, counts: Mapping[str, int]) -> str:
    result = f"{counts['passed']} passed, {counts['skipped']} skipped"
    kit, torch = (f"{name} {importlib.metadata.version(name)}" for name in ("stratagem-testing", "torch"))
    date = datetime.datetime.now(datetime.UTC).date()
    return f"| {entry.kind} `{entry.name}` | {entry.version} | {result} | {kit}, {torch} | {date} |\n"


def stated(entry: Entry) -> str | None:
    """Return what the package of `entry` states for its installed version, such as "76 passed, 4 skipped"."""
    return results(_metadata(entry.distribution)).get((entry.kind, entry.name, entry.version))


def results(text: str) -> dict[tuple[str, str, str], str]:
    """Return what a README states: the result of each plugin, by kind, name and version."""
    table = text.partition(_HEADING)[2]
    return {(kind, name, version): result for kind, name, version, result in _ROW.findall(table)}


@functools.cache
def _metadata(distribution: str) -> str:
    try:
        return importlib.metadata.distribution(distribution).read_text("METADATA") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""  # read from its sources, not installed
