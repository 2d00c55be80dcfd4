"""Every first-party communication hook under the kit."""

from __future__ import annotations

import pytest

from stratagem_testing import CommHookConformance


class TestAllReduce(CommHookConformance):
    plugin = "allreduce"
    tolerance = 1e-6
    training_tolerance = 1e-6


class TestFP16Compress(CommHookConformance):
    plugin = "fp16_compress"
    tolerance = 1e-3
    training_tolerance = 1e-3


class TestBF16Compress(CommHookConformance):
    plugin = "bf16_compress"


class TestPowerSGD(CommHookConformance):
    """From the third step on, as with buckets that DDP rebuilds after the first."""

    plugin = {"name": "powersgd", "rank": 4, "start_powerSGD_iter": 2}  # noqa: RUF012
    tolerance = None
    training_tolerance = 5e-2


@pytest.mark.sweep(guard="tests/conformance/test_comm_hooks.py::TestPowerSGD")
class TestPowerSGDFromTheFirstStep(CommHookConformance):
    """Without a memory of earlier steps there is nothing to wait for."""

    plugin = {  # noqa: RUF012
        "name": "powersgd", "rank": 4, "start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False,
    }  # fmt: skip
    tolerance = None
    training_tolerance = 2e-1


class TestBatchedPowerSGD(CommHookConformance):
    plugin = {"name": "batched_powersgd", "rank": 4, "start_powerSGD_iter": 2}  # noqa: RUF012
    tolerance = None
    training_tolerance = 1e-1


class TestInt8(CommHookConformance):
    plugin = "int8"
    tolerance = None
    training_tolerance = 1e-2


@pytest.mark.sweep(guard="tests/conformance/test_comm_hooks.py::TestInt8")
class TestInt8WithoutFeedback(CommHookConformance):
    plugin = {"name": "int8", "error_feedback": False}  # noqa: RUF012
    tolerance = 2e-2
    training_tolerance = 2e-2


class TestTopK(CommHookConformance):
    plugin = {"name": "topk", "ratio": 0.25}  # noqa: RUF012
    tolerance = None
    training_tolerance = 1e-1


class TestOneBit(CommHookConformance):
    """Ten steps of signs do not take a weight far; how far many of them do is another test."""

    plugin = {"name": "one_bit", "start_iter": 0}  # noqa: RUF012
    tolerance = None
    training_tolerance = 8e-1
