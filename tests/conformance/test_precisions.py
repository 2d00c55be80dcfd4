"""Every first-party precision under the kit."""

from __future__ import annotations

import pytest

from stratagem_testing import PrecisionConformance

WHERE_IT_CHANGED = pytest.mark.when_changed(
    "plugins/basics/stratagem_precision", "plugins/testing/", reason="others of its kind pass the same checks"
)


class TestFull(PrecisionConformance):
    plugin = "32-true"


@WHERE_IT_CHANGED
class TestDouble(PrecisionConformance):
    plugin = "64-true"


@WHERE_IT_CHANGED
class TestHalf(PrecisionConformance):
    plugin = "16-true"


@WHERE_IT_CHANGED
class TestBFloat16(PrecisionConformance):
    plugin = "bf16-true"


class TestMixed(PrecisionConformance):
    plugin = "bf16-mixed"


class TestScaled(PrecisionConformance):
    plugin = "16-mixed"
