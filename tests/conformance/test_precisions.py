"""Every first-party precision under the kit."""

from __future__ import annotations

import pytest

from stratagem_testing import PrecisionConformance


class TestFull(PrecisionConformance):
    plugin = "32-true"


@pytest.mark.when_changed(
    "plugins/basics/stratagem_precision", "plugins/testing/", reason="others of its kind pass the same checks"
)
class TestDouble(PrecisionConformance):
    plugin = "64-true"


@pytest.mark.when_changed(
    "plugins/basics/stratagem_precision", "plugins/testing/", reason="others of its kind pass the same checks"
)
class TestHalf(PrecisionConformance):
    plugin = "16-true"


@pytest.mark.when_changed(
    "plugins/basics/stratagem_precision", "plugins/testing/", reason="others of its kind pass the same checks"
)
class TestBFloat16(PrecisionConformance):
    plugin = "bf16-true"


class TestMixed(PrecisionConformance):
    plugin = "bf16-mixed"


class TestScaled(PrecisionConformance):
    plugin = "16-mixed"
