"""Checks of the strategy with other plugins: precisions and comm hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

import stratagem as sg
from stratagem.api.capabilities import ACCUMULATION, GRADIENT_BUCKETS, SHARDED_PARAMETERS
from stratagem_testing.conformance import refusal
from stratagem_testing.expectations import expect_equal
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, train_module_plainly
from stratagem_testing.strategy.base import StrategyChecks
from stratagem_testing.training import EveryBatch, train


class CombinationChecks(StrategyChecks):
    """Precisions, and a comm hook that counts what it is given."""

    #: Names of precisions to train in. What else is installed changes nothing.
    precisions: ClassVar[Sequence[str]] = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")

    @classmethod
    def parameters(cls) -> dict[str, Sequence[Any]]:
        return super().parameters() | {"precision": cls.precisions}

    def test_precisions(self, world_size: int, precision: str) -> None:
        """Each precision trains within its rounding error, or is refused with a reason."""
        if reason := refusal(lambda: sg.Trainer(**self._arguments(world_size, precision=precision))):
            pytest.skip(reason)
        batches = self.batches(8)
        policy = sg.Run(precision=precision, accelerator=self.accelerator).policy

        results = self._train(world_size, Net, batches, precision=precision)

        used = [batches[index] for index in results[0]["used"]]
        assert len(used) >= 2, f"only batches {results[0]['used']} led to a step; skip those that overflow alone"
        look = f"gradients must be averaged once in {precision}, before they are unscaled or after it"
        self._compare(results, train_module_plainly(self.maker(Net)(), used)[0], tolerance_of(policy), look)

    def test_gradient_buckets(self, world_size: int) -> None:
        """Comm hooks are given every gradient once in each synchronized step, and what they return is applied."""
        self._require(GRADIENT_BUCKETS, world_size, comm_hook=[_CountingHook()])
        batches = self.batches(4)
        accumulate = 2 if self.claims(ACCUMULATION) else 1
        reference, _ = train_module_plainly(self.maker(Net)(), batches, accumulate)

        results = self._run(world_size, _train_counting_buckets, self.maker(Net), batches, accumulate)

        self._compare(results, reference)
        size = sum(parameter.numel() for parameter in self.maker(Net)().parameters())
        if self.claims(SHARDED_PARAMETERS):  # hooks are given only what is averaged over replicas, by shards
            given = sum(min(result["elements"]) for result in results)
            assert given >= size, f"comm hooks of all ranks got {given} gradients of {size}; give them every bucket"
        for result in results:
            if self.claims(SHARDED_PARAMETERS):
                assert min(result["last"]) >= 1, "no bucket of a backward sets is_last"
                continue
            steps, look = 4 // accumulate, "call `bucket_reducer(run)` once with each bucket"
            expect_equal("gradients given to a comm hook in each step", result["elements"], [size] * steps, look)
            expect_equal("buckets that set is_last in each step", result["last"], [1] * steps, "set it in the last")


# --- In each process ---------------------------------------------------------------------------------------------


class _CountingHook(sg.CommHook):
    """Counts the elements that it is given, and the buckets that set `is_last`."""

    def __init__(self) -> None:
        self.elements, self.last = 0, 0

    @sg.hookimpl
    def reduce_bucket(self, bucket: Any) -> Any:
        self.elements += bucket.buffer.numel()
        self.last += bool(bucket.is_last)
        return (yield bucket.buffer)


def _train_counting_buckets(
    rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, accumulate: int
) -> Any:
    hook = _CountingHook()

    def read(trainer: sg.Trainer) -> tuple[int, int]:
        seen = hook.elements, hook.last
        hook.elements = hook.last = 0
        return seen

    reader = EveryBatch(read)
    arguments = {"comm_hook": [hook], "callbacks": [reader], "accumulate_grad_batches": accumulate}
    result = train(rank, size, make, batches, choose | arguments)
    closing = reader.results[accumulate - 1 :: accumulate]
    result["elements"], result["last"] = [seen for seen, _ in closing], [last for _, last in closing]
    return result
