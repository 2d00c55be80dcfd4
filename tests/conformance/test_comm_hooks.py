"""Every first-party communication hook under the kit."""

from __future__ import annotations

import pytest

from stratagem_comm_hooks import conformance
from stratagem_testing import CommHookConformance

WHERE_IT_CHANGED = pytest.mark.when_changed(
    "plugins/comm_hooks/", "plugins/testing/", reason="the other hooks pass the same checks"
)


class TestAllReduce(conformance.ExactConformance):
    plugin = "allreduce"


class TestFP16Compress(conformance.FP16Conformance):
    plugin = "fp16_compress"


@WHERE_IT_CHANGED
class TestBF16Compress(CommHookConformance):
    plugin = "bf16_compress"


class TestPowerSGD(conformance.PowerSGDConformance): ...


@pytest.mark.sweep(guard="tests/conformance/test_comm_hooks.py::TestPowerSGD")
class TestPowerSGDFromTheFirstStep(CommHookConformance):
    """Without a memory of earlier steps there is nothing to wait for."""

    plugin = {  # noqa: RUF012
        "name": "powersgd", "rank": 4, "start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False,
    }  # fmt: skip
    tolerance = None
    training_tolerance = 2e-1


@WHERE_IT_CHANGED
class TestBatchedPowerSGD(conformance.BatchedPowerSGDConformance): ...


class TestInt8(conformance.Int8Conformance):
    plugin = "int8"


@pytest.mark.sweep(guard="tests/conformance/test_comm_hooks.py::TestInt8")
class TestInt8WithoutFeedback(CommHookConformance):
    plugin = {"name": "int8", "error_feedback": False}  # noqa: RUF012
    tolerance = 2e-2
    training_tolerance = 2e-2


@WHERE_IT_CHANGED
class TestTopK(conformance.TopKConformance): ...


@WHERE_IT_CHANGED
class TestOneBit(conformance.OneBitConformance):
    """How far many steps take a weight is another test."""
