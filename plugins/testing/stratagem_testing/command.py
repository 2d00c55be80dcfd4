"""``stratagem plugins check NAME``: run the conformance class of an installed plugin without its own tests."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stratagem.discovery import registry
from stratagem.discovery.registry import Entry
from stratagem.errors import ConfigError

_TEST = """
from {module} import {cls}

class Test{cls}({cls}):
    kind = {kind!r}
    plugin = {name!r}
    world_sizes = {world_sizes!r}
    unplannable = None
"""


def conformance_class(kind: str) -> str:
    """Return the conformance class for `kind`, as ``module:Class``.

    Raises:
        ConfigError: there is none (commands have no contract to hold).
    """
    kinds = registry.kinds()
    if kind not in kinds:
        raise ConfigError(f"a {kind} has no conformance class", expected=", ".join(kinds))
    return kinds[kind].conformance


def check(entry: Entry, world_sizes: Sequence[int], quiet: bool = False) -> list[dict[str, Any]]:
    """Run the conformance checks of `entry`; return a row for each: ``check``, ``outcome`` and ``reason``.

    Prints pytest's output, unless `quiet`.
    """
    module, _, cls = conformance_class(entry.kind).partition(":")
    rows = _Rows()
    with tempfile.TemporaryDirectory(prefix="stratagem-check-") as folder:
        # A name of its own: pytest would take the module of an earlier check in this process.
        path = Path(folder) / f"test_{Path(folder).name.replace('-', '_')}.py"
        facts = {"module": module, "cls": cls, "kind": entry.kind, "name": entry.qualified_name}
        path.write_text(_TEST.format(**facts, world_sizes=tuple(world_sizes)))
        options = [
            "-q",
            "-rs",
            "--rootdir",
            folder,
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "--import-mode=importlib",
        ]
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            pytest.main([str(path), *options], plugins=[rows])
    return rows.rows


class _Rows:
    """Collects the outcomes of a pytest session."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            name = report.nodeid.rpartition("::")[2]
            self.rows.append({"check": name, "outcome": report.outcome, "reason": reason.removeprefix("Skipped: ")})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.rows.append({"check": "collection", "outcome": "failed", "reason": str(report.longrepr)})
