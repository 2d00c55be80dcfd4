"""Metrics of torchmetrics count each sample once, however the model is cut."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

BATCHES = joined_batches(4, 8)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Measures(Net):
    def __init__(self):
        import torchmetrics

        super().__init__()
        self.sum, self.largest = torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.error, self.all = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.sum(torch.ones(len(x)))
        self.largest(y.max())
        self.error(self.net(x), y)
        self.all(y[:, 0])
        for name in ("sum", "largest", "error"):
            self.log(name, getattr(self, name))

    def on_validation_epoch_end(self):
        self.log("count", float(len(self.all.compute())))
        self.all.reset()


def _validate(rank, world_size, strategy):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    module = Measures()
    (found,) = trainer.validate(module, share(trainer, BATCHES))
    assert module.sum.dist_sync_fn is None
    return found


@pytest.mark.usefixtures("torchmetrics_preloaded")
@pytest.mark.every_push("tensor")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        pytest.param(2, "ddp", id="ddp"), pytest.param(2, "fsdp", id="fsdp"),
        pytest.param(2, {"name": "parallel", "tensor": 2}, id="tensor"),
        pytest.param(4, {"name": "parallel", "tensor": 2, "replicate": 2}, id="tensor and replicate"),
        pytest.param(4, {"name": "parallel", "tensor": 2, "shard": 2}, id="tensor and shard"),
    ],
)  # fmt: skip
def test_they_are_as_in_one_process(size, strategy):
    (expected,) = run_in_processes(_validate, 1, "single_device")
    assert (expected["sum"], expected["count"]) == (32, 32)
    for found in run_in_processes(_validate, size, strategy):
        assert found == pytest.approx(expected)
