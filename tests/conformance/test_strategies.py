"""Every first-party strategy under the kit."""

from __future__ import annotations

from stratagem.testing import StrategyConformance


class TestSingleDevice(StrategyConformance):
    plugin = "single_device"


class TestDDP(StrategyConformance):
    plugin = "ddp"
