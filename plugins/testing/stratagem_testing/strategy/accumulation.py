"""Checks of gradient accumulation and of clipping."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import stratagem as sg
from stratagem.api.capabilities import (
    ACCUMULATION,
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CUSTOM_CLIPPING,
    NO_SYNC,
    SHARDED_PARAMETERS,
)
from stratagem_testing.expectations import expect_equal
from stratagem_testing.reference import CustomClipping, Net, train_module_plainly
from stratagem_testing.strategy.base import StrategyChecks
from stratagem_testing.training import EveryBatch, bytes_sent, share

_CLIPPED = "`clip_gradients` must clip the averaged gradients of the whole model, once before each step"


class AccumulationChecks(StrategyChecks):
    """Accumulation over several batches, and gradients clipped by norm, by value and by the module itself."""

    def test_accumulation(self, world_size: int) -> None:
        """Accumulate over three batches; the last window is shorter."""
        batches = self.batches(8)
        self._require(ACCUMULATION, world_size, accumulate_grad_batches=2)

        results = self._train(world_size, Net, batches, accumulate_grad_batches=3)

        expect_equal("steps of 8 batches, three a step", results[0]["steps"], 3, "step where `run.sync_gradients`")
        self._compare(results, train_module_plainly(self.maker(Net)(), batches, accumulate=3)[0])

    def test_inner_micro_batches_send_no_gradients(self, several: int) -> None:
        """Counted in bytes sent: a batch within a window sends fewer than the last of it, or no gradients at all."""
        if self.claims(ACCUMULATION) and not self.claims(NO_SYNC):
            pytest.skip(f"{NO_SYNC!r} is not claimed, so batches within a window may send gradients")
        self._require(ACCUMULATION, several, accumulate_grad_batches=2)
        if not self._averages(several):
            pytest.skip("no two ranks have different samples, or parts of them: there are no gradients to average")
        if bytes_sent() is None:
            pytest.skip("this system does not report how many bytes a connection sent")
        counts = self._run(several, _bytes_by_batch, self.maker(Net), self.batches(7))
        gradients = sum(parameter.numel() * 4 for parameter in self.maker(Net)().parameters())
        for by_batch in counts:
            closing = min(by_batch[2], by_batch[5])
            # The first also opens connections. What an engine sends in the background adds to some of them.
            inner = min(by_batch[index] for index in (1, 3, 4))
            said = f"`backward` must send gradients where `run.sync_gradients` alone; bytes sent by batch: {by_batch}"
            assert closing - inner > gradients / 4, said
            if not (self.claims(SHARDED_PARAMETERS) or self._is_cut(several)):
                assert inner < gradients / 4, said

    def test_clip_by_norm(self, world_size: int) -> None:
        batches = self.batches(8)
        self._require(CLIP_BY_NORM, world_size, gradient_clip_val=1.0)
        reference, norms = train_module_plainly(self.maker(Net)(), batches, max_norm=0.5)
        assert min(norms) > 0.5, "the reference is never clipped"

        self._compare(self._train(world_size, Net, batches, gradient_clip_val=0.5), reference, look=_CLIPPED)

    def test_clip_by_value(self, world_size: int) -> None:
        batches = self.batches(8)
        limits: dict[str, Any] = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
        self._require(CLIP_BY_VALUE, world_size, **limits)

        self._compare(
            self._train(world_size, Net, batches, **limits),
            train_module_plainly(self.maker(Net)(), batches, max_value=0.05)[0],
            look=_CLIPPED,
        )

    def test_clipping_with_accumulation(self, world_size: int) -> None:
        """The gradient of the whole window is clipped, not that of each batch; the last window is shorter."""
        batches = self.batches(7)
        self._require(CLIP_BY_NORM, world_size, gradient_clip_val=1.0)
        self._require(ACCUMULATION, world_size, accumulate_grad_batches=2)

        results = self._train(world_size, Net, batches, gradient_clip_val=0.5, accumulate_grad_batches=3)

        self._compare(results, train_module_plainly(self.maker(Net)(), batches, 3, max_norm=0.5)[0], look=_CLIPPED)

    def test_custom_clipping(self, world_size: int) -> None:
        """A module that clips gradients itself sees complete, averaged gradients."""
        batches = self.batches(6)
        self._require(CUSTOM_CLIPPING, world_size, CustomClipping)

        reference, _ = train_module_plainly(self.maker(Net)(), batches, max_norm=0.5)
        self._compare(self._train(world_size, CustomClipping, batches), reference)


# --- In each process ---------------------------------------------------------------------------------------------


def _bytes_by_batch(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> list[int]:
    counter = EveryBatch(lambda trainer: bytes_sent())
    trainer = sg.Trainer(**(choose | {"accumulate_grad_batches": 3, "callbacks": [counter]}))
    mine = share(trainer, batches)
    before = bytes_sent() or 0
    trainer.fit(make(), mine)
    totals = [before, *counter.results]
    return [after - earlier for earlier, after in itertools.pairwise(totals)]
