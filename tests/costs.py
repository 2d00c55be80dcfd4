"""What each test costs: ``pytest --costs FILE`` writes a line of JSON for each, and prints sums by class and by file.

CPU seconds are those of the worker, of processes that it has waited for, and of its living descendants: a process that
forks scripts lives on, and the system adds the scripts to it when they end. What fixtures of a module cost is part of
the first test that uses them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

from starts import cpu_seconds, started

KEY = "costs"
CLASSES = ("in this process, below 0.1 s", "in this process", "conformance kit", "forked ranks", "new programs")


class Measure:
    """On a worker: measures each test, and sends its costs with the report of its end."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self._before = self._now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "teardown":
            costs = {name: round(value - self._before[name], 3) for name, value in self._now().items()}
            costs["kit"] = item.nodeid.startswith("tests/conformance/")
            report.user_properties.append((KEY, costs))
        return report

    def _now(self) -> dict[str, float]:
        return {"cpu": cpu_seconds(), "wall": time.perf_counter(), **started}


class Collect:
    """Where reports arrive: writes a line for each test, and prints sums at the end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._rows: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report):
        for name, costs in report.user_properties:
            if name == KEY and report.when == "teardown":
                row = {"test": report.nodeid, "class": _class_of(costs), **costs}
                self._rows.append(row)
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_sep("=", "costs")
        for key, shown in ((lambda row: row["class"], 5), (lambda row: row["test"].partition("::")[0], 40)):
            for line in _table(self._rows, key)[: shown + 1]:
                terminalreporter.write_line(line)


def _class_of(costs: dict[str, float]) -> str:
    if costs["kit"]:
        return CLASSES[2]
    if costs["interpreters"] + costs["scripts"]:
        return CLASSES[4]
    return CLASSES[3] if costs["ranks"] else CLASSES[costs["cpu"] >= 0.1]


def _table(rows, key) -> list[str]:
    groups = defaultdict(list)
    for row in [*rows, *({**row, "test": "all::", "class": "all"} for row in rows)]:
        groups[key(row)].append(row)
    sums = {
        name: [len(group), *(sum(row[each] for row in group) for each in ("cpu", "wall"))]
        for name, group in groups.items()
    }
    return [
        f"{cases:6} cases {cpu:8.1f} CPU s {wall:8.1f} s  {name}"
        for name, (cases, cpu, wall) in sorted(sums.items(), key=lambda each: -each[1][1])
    ]
