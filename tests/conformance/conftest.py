"""What the kit starts here is a fork of a process that has imported torch."""

from __future__ import annotations

import pytest

from programs import scripts
from stratagem_testing import StrategyConformance


@pytest.fixture(autouse=True)
def plans_in_forks(monkeypatch):
    monkeypatch.setattr(StrategyConformance, "popen", scripts.Popen)
