"""What the conformance kit needs to know of these hooks: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import Any, ClassVar

from stratagem_testing import CommHookConformance


class ExactConformance(CommHookConformance):
    """It averages exactly."""

    tolerance = 1e-6
    training_tolerance = 1e-6


class FP16Conformance(CommHookConformance):
    """fp16 has 10 bits."""

    tolerance = 1e-3
    training_tolerance = 1e-3


class PowerSGDConformance(CommHookConformance):
    """From the third step on, as with buckets that DDP rebuilds after the first."""

    plugin: ClassVar = {"name": "powersgd", "rank": 4, "start_powerSGD_iter": 2}
    tolerance = None
    training_tolerance = 5e-2


class BatchedPowerSGDConformance(CommHookConformance):
    """The same."""

    plugin: ClassVar = {"name": "batched_powersgd", "rank": 4, "start_powerSGD_iter": 2}
    tolerance = None
    training_tolerance = 1e-1


class Int8Conformance(CommHookConformance):
    """It feeds errors back."""

    tolerance = None
    training_tolerance = 1e-2


class TopKConformance(CommHookConformance):
    """It sends a quarter."""

    plugin: ClassVar = {"name": "topk", "ratio": 0.25}
    tolerance = None
    training_tolerance = 1e-1


class OneBitConformance(CommHookConformance):
    """Ten steps of signs do not take a weight far."""

    plugin: ClassVar = {"name": "one_bit", "start_iter": 0}
    tolerance = None
    training_tolerance = 8e-1


class NoopConformance(CommHookConformance):
    """It averages nothing, on purpose; a checkpoint has the weights of rank 0, and those of others differ."""

    test_averages_over_the_ranks: Any = None
    test_does_not_wait: Any = None
    test_what_is_not_finite_stays_so: Any = None
    test_trains: Any = None
    test_trains_with_accumulation_and_clipping: Any = None
    test_stacks_over_and_under_another_hook: Any = None
    test_resumes_as_if_never_stopped: Any = None
