"""`pytest --check-slow` tells which tests take seconds and are not marked as slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def hook(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))


@pytest.mark.parametrize(
    ("asked", "marked", "when", "seconds", "outcome"),
    [
        (True, False, "call", 5.5, "failed"),
        (True, False, "call", 4.5, "passed"),
        (True, True, "call", 5.5, "passed"),
        (True, False, "setup", 5.5, "passed"),  # of a fixture that several tests share
        (False, False, "call", 5.5, "passed"),
    ],
)
def test_seconds_without_a_mark_are_a_failure(hook, asked, marked, when, seconds, outcome):
    item = SimpleNamespace(
        config=SimpleNamespace(getoption=lambda name, default: asked), get_closest_marker=lambda name: marked
    )
    report = SimpleNamespace(when=when, passed=True, outcome="passed", longrepr=None)
    told = hook.pytest_runtest_makereport(item, SimpleNamespace(duration=seconds))
    next(told)
    with pytest.raises(StopIteration):
        told.send(report)

    assert report.outcome == outcome
    assert (report.longrepr == "it took 5.5 s; mark it with pytest.mark.slow, or make it faster") is (
        outcome == "failed"
    )
