"""Write the outcome of each test to a file as soon as it is known (pytest -p outcomes --outcomes FILE).

A line of JSON each, so that a run that is ended at its time limit has not run for nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file for a line of JSON for each test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # under xdist its main process alone sees all tests
        config.pluginmanager.register(Outcomes(path))


class Outcomes:
    """Adds up the phases of a test."""

    def __init__(self, path: Path) -> None:
        self.path, self.running = path, dict[str, dict[str, Any]]()
        self.unreadable: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write({"planned": len(session.items)})

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if node.gateway.id == "gw0":
            self._write({"planned": len(ids)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # Every process of xdist collects, and each would tell.
        if report.failed and report.nodeid not in self.unreadable:
            self.unreadable.add(report.nodeid)
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "reason": report.longreprtext})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.running.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "reason": ""}
        )
        entry["seconds"] = round(entry["seconds"] + report.duration, 2)
        if report.outcome != "passed" and entry["outcome"] != "failed":
            expected = hasattr(report, "wasxfail")
            entry["outcome"] = report.outcome if not expected else "xfailed"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            entry["reason"] = str(reason).removeprefix("Skipped: ")
        if report.when == "teardown":
            self._write(self.running.pop(report.nodeid))

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
