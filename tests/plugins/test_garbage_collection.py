"""The callback `garbage_collection`."""

from __future__ import annotations

import gc
import weakref

import pytest

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip


class _Node:
    """Refers to itself: only a collection frees it."""

    def __init__(self):
        self.me = self


class Wasteful(Net):
    """Makes garbage in each step, of which each rank has another amount, and remembers what is left."""

    def __init__(self, garbage=1, fails=False):
        super().__init__()
        self.garbage, self.fails, self.nodes, self.left = garbage, fails, [], []

    def training_step(self, batch, batch_idx):
        self.left.append(sum(node() is not None for node in self.nodes))
        self.nodes = [node for node in self.nodes if node() is not None]
        self.nodes += [weakref.ref(_Node()) for _ in range(self.garbage)]
        if self.fails:
            raise RuntimeError("no")
        return super().training_step(batch, batch_idx)


def _train(rank, world_size):
    trainer = sg.Trainer(
        strategy="ddp", devices=world_size, callbacks={"name": "garbage_collection", "every_n_steps": 3}, **QUIET
    )
    module = Wasteful(garbage=1 + 2000 * rank)
    trainer.fit(module, share(trainer, joined_batches(8, 16)))
    return [left // module.garbage for left in module.left], gc.isenabled()


@pytest.mark.slow
def test_ranks_collect_in_the_same_steps_and_not_between():
    for left, is_enabled in run_in_processes(_train, 2):
        assert left == [0, 1, 2, 0, 1, 2, 0, 1]  # what is left of the steps before
        assert is_enabled


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_afterwards_python_collects_as_before(enabled, fails):
    trainer = sg.Trainer(callbacks="garbage_collection", **QUIET)
    try:
        if not enabled:
            gc.disable()
        if fails:
            with pytest.raises(RuntimeError, match="no"):
                trainer.fit(Wasteful(fails=True), joined_batches(2, 16))
        else:
            module = Wasteful()
            trainer.fit(module, joined_batches(2, 16))
            assert not any(node() for node in module.nodes)  # the end of the epoch
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
