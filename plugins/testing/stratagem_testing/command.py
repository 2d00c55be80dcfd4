"""``stratagem plugins check NAME``: run the conformance class of an installed plugin without its own tests."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stratagem.discovery import registry
from stratagem.discovery.registry import Entry
from stratagem.errors import ConfigError
from stratagem.stack.construction import make
from stratagem_testing.frames import files_of

#: Of entry points: ``"callback.early_stopping" = "package.conformance:Class"``.
_GROUP = "stratagem_testing.conformance"
_TEST = """
from {module} import {cls} as Base

class Test{cls}(Base):
"""


def conformance_class(entry: Entry) -> str:
    """Return the class that checks `entry`, as ``module:Class``: what its package states, or that of its kind.

    Raises:
        ConfigError: there is none (commands have no contract to hold).
    """
    kinds = registry.kinds()
    if entry.kind not in kinds:
        raise ConfigError(
            f"the kit has no checks of a {entry.kind}", expected=", ".join(kinds), do="run the tests of its package"
        )
    stated = importlib.metadata.entry_points(group=_GROUP, name=f"{entry.kind}.{entry.name}")
    found = (each.value for each in stated if each.dist is not None and each.dist.name == entry.distribution)
    return next(found, kinds[entry.kind].conformance)


def check(
    entry: Entry, options: Mapping[str, Any] | None = None, quiet: bool = False, full_trace: bool = False,
    **attributes: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the conformance checks of `entry`; return a row for each: ``check``, ``outcome`` and ``reason``.

    Prints pytest's output and a line for each failed check, unless `quiet`. The first line of its reason is a sentence.

    Args:
        options: of the plugin, beside those that its package states.
        full_trace: show all frames of tracebacks and what the checks print, not the frames of the plugin alone.
        attributes: of the class, in place of what its package states, such as ``world_sizes``.

    Raises:
        ConfigError: nothing checks its kind, the class does not have one of `attributes`, or an option is missing.
    """
    module, _, cls = conformance_class(entry).partition(":")
    base = getattr(importlib.import_module(module), cls)
    if unknown := [name for name in attributes if not hasattr(base, name)]:
        raise ConfigError(f"{base.__name__} has no {unknown[0]}", expected="what the checks of its kind have")
    chosen = dict(base.plugin) if isinstance(base.plugin, Mapping) else {}
    chosen |= {"name": entry.qualified_name, **(options or {})}
    # A missing option is one line.
    plugin = make(entry, {name: value for name, value in chosen.items() if name != "name"})
    stated = {"kind": entry.kind, **attributes}
    if base.plugin is None or options:
        stated["plugin"] = chosen if len(chosen) > 1 else entry.qualified_name
    rows = _Rows("" if full_trace else files_of(type(plugin)))
    with tempfile.TemporaryDirectory(prefix="stratagem-check-") as folder:
        # A name of its own: pytest would take the module of an earlier check in this process.
        path = Path(folder) / f"test_{Path(folder).name.replace('-', '_')}.py"
        lines = [f"    {name} = {value!r}\n" for name, value in stated.items()]
        path.write_text(_TEST.format(module=module, cls=cls) + "".join(lines))
        arguments = [
            "-q",
            "-rs",
            "--rootdir",
            folder,
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "--import-mode=importlib",
            *(["--full-trace"] if full_trace else ["--tb=short", "--show-capture=no"]),
        ]
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            pytest.main([str(path), *arguments], plugins=[rows])
            failed = [row for row in rows.rows if row["outcome"] == "failed"]
            for row in failed:
                print(f"{row['check']}: {row['reason'].splitlines()[0]}")
            if len(failed) > 1:
                print("begin with the first: its cause may be that of the others")
    return rows.rows


class _Rows:
    """Collects the outcomes of a pytest session, and leaves the frames in `files` alone in its tracebacks."""

    def __init__(self, files: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._files, self._hung = files, 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is None or isinstance(call.excinfo.value, pytest.skip.Exception):
            return
        error, frames = call.excinfo.value, call.excinfo.traceback
        said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        self._hung += "`limit_s`" in said.partition("\n")[0]
        if self._hung == 2:
            item.session.shouldstop = "two checks did not end within `limit_s`: the others would need as long"
        item.user_properties.append(("sentence", said.partition("\n")[0]))
        own = frames.filter(lambda frame: str(frame.path).startswith(self._files))
        if own or isinstance(error, AssertionError):  # the frames of a check say nothing
            call.excinfo.traceback = own

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            reason = "\n".join([*dict(report.user_properties).values(), reason])
            name = report.nodeid.rpartition("::")[2]
            self.rows.append({"check": name, "outcome": report.outcome, "reason": reason.removeprefix("Skipped: ")})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.rows.append({"check": "collection", "outcome": "failed", "reason": str(report.longrepr)})
