"""What each test costs: ``pytest --costs FILE`` writes a line of JSON for each, and prints sums by class and by file.

CPU seconds are those of the worker, of processes that it has waited for, and of its living descendants: a process that
forks scripts lives on, and the system adds the scripts to it when they end. What fixtures of a module cost is part of
the first test that uses them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

KEY = "costs"
TICKS = os.sysconf("SC_CLK_TCK")
CLASSES = ("in this process, below 0.1 s", "in this process", "conformance kit", "forked ranks", "new programs")

_started = {"forks": 0, "programs": 0}


def _count(event: str, _: object) -> None:
    if event == "os.fork":
        _started["forks"] += 1
    elif event == "subprocess.Popen":
        _started["programs"] += 1


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of what it has waited for, and of its living descendants."""
    own, living = os.times(), _living()
    below = sum(living[pid][1] for pid in _descendants(os.getpid(), living))
    return own.user + own.system + own.children_user + own.children_system + below


def _living() -> dict[int, tuple[int, float]]:
    """Return the parent and the CPU seconds of each process of this machine; nothing where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    return found


def _descendants(pid: int, living: dict[int, tuple[int, float]]) -> list[int]:
    children = [child for child, (parent, _) in living.items() if parent == pid]
    return [*children, *(found for child in children for found in _descendants(child, living))]


class Measure:
    """On a worker: measures each test, and sends its costs with the report of its end."""

    def __init__(self) -> None:
        sys.addaudithook(_count)
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
        return {"cpu": cpu_seconds(), "wall": time.perf_counter(), **_started}


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
    if costs["programs"]:
        return CLASSES[4]
    return CLASSES[3] if costs["forks"] else CLASSES[costs["cpu"] >= 0.1]


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
