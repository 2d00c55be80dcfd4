"""Every first-party precision under the kit."""

from __future__ import annotations

from stratagem_testing import PrecisionConformance


class TestFull(PrecisionConformance):
    plugin = "32-true"


class TestDouble(PrecisionConformance):
    plugin = "64-true"


class TestHalf(PrecisionConformance):
    plugin = "16-true"


class TestBFloat16(PrecisionConformance):
    plugin = "bf16-true"


class TestMixed(PrecisionConformance):
    plugin = "bf16-mixed"


class TestScaled(PrecisionConformance):
    plugin = "16-mixed"
