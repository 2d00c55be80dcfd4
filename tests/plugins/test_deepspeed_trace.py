"""Stage 3 gathers layers in one order for all ranks: a rank that goes another way is named, and nobody waits."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.strategies import DeepSpeedStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import joined_batches, loss_of, relative_difference
from stratagem_testing.training import outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
    "num_sanity_val_steps": 0,
}  # fmt: skip
BATCHES = joined_batches(7, 24)
#: Cases beside the most telling one.
WHERE_IT_CHANGED = pytest.mark.when_changed("plugins/deepspeed/")
#: Far above what a refusal may take, and far below what a test may: a rank that waits fails the test.
TIMEOUT_S = 40


class Pets(sg.Module):
    """Each batch goes through one of two layers of the same shape; `kind` tells which, by rank and batch."""

    def __init__(self, kind, stage="train"):
        super().__init__()
        self.kind, self.branching = kind, stage
        torch.manual_seed(0)
        self.body, self.cat, self.dog, self.head = (
            nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        )  # fmt: skip

    def forward(self, x, kind):
        h = torch.tanh(self.body(x))
        h = {"cat": self.cat, "dog": self.dog, "none": nn.Identity()}[kind](h)
        return self.head(h)

    def training_step(self, batch, batch_idx):
        kind = self.kind(self.global_rank, batch_idx) if self.branching == "train" else "cat"
        return loss_of(self(batch[0], kind), batch[1])

    def validation_step(self, batch, batch_idx):
        self(batch[0], self.kind(self.global_rank, batch_idx) if self.branching == "validate" else "cat")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def strategy(gathers):
    """Stage 3; small parameters stay whole on each rank unless `gathers`."""
    if not gathers:
        return DeepSpeedStrategy(stage=3, timeout=TIMEOUT_S)
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    return DeepSpeedStrategy(config=config | {"zero_allow_untested_optimizer": True}, timeout=TIMEOUT_S)


def train(world_size, make, plugin, **arguments):
    trainer = sg.Trainer(strategy=plugin, devices=world_size, **QUIET | arguments)
    mine, weights = share(trainer, BATCHES), None
    began = time.monotonic()
    try:
        trainer.fit(make(), mine, val_dataloaders=mine[:2])
        weights = weights_of(trainer)
    finally:
        took_s = time.monotonic() - began
        trainer.close()
    return weights, took_s


#: Which layer a rank uses in a batch, and in which stage.
WAYS = {
    "from the first batch": (lambda rank, _: "dog" if rank else "cat", "train"),
    "later": (lambda rank, batch: "dog" if rank and batch == 4 else "cat", "train"),
    "left out later": (lambda rank, batch: "none" if rank == 0 and batch == 5 else "cat", "train"),
    "in validation": (lambda rank, batch: "none" if rank and batch == 1 else "cat", "validate"),
}


def _goes_another_way(rank, world_size, way, gathers):
    kind, stage = WAYS[way]
    began = time.monotonic()
    said = outcome(lambda: train(world_size, lambda: Pets(kind, stage), strategy(gathers)))
    return said, time.monotonic() - began


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_trace.py::test_a_forward_on_one_rank_alone_is_named",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "gathers"), [*((way, True) for way in WAYS), ("later", False), ("in validation", False)]
)
def test_a_rank_that_goes_through_other_layers_is_named_on_all_ranks(way, gathers):
    for said, took_s in run_in_processes(_goes_another_way, 2, way, gathers):
        assert said.startswith("refused: "), said
        assert "ranks went through different layers: rank 0 reached the forward of " in said
        assert "; rank 1 reached the forward of " in said
        assert "'cat'" in said
        assert took_s < TIMEOUT_S


def _together(rank, world_size, gathers):
    kinds = ("cat", "cat", "dog", "cat", "dog", "none", "cat")

    def make():
        return Pets(lambda _, batch: kinds[batch])

    expected, _ = train(world_size, make, "ddp_find_unused_parameters_true")
    return relative_difference(train(world_size, make, strategy(gathers))[0], expected)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_trace.py::test_a_forward_on_one_rank_alone_is_named",
)
@pytest.mark.slow
@pytest.mark.parametrize("gathers", [True, False])
def test_ranks_that_change_their_way_together_train_on(gathers):
    for distance in run_in_processes(_together, 2, gathers, limit_s=360):
        assert distance < 1e-6


class Samples(sg.Callback):
    """Looks at a prediction between two epochs, on rank 0 alone."""

    @sg.hookimpl
    def on_train_epoch_end(self, trainer, module):
        if trainer.global_rank == 0:
            module(BATCHES[0][0], "cat")


#: Where rank 0 computes alone.
LINE = inspect.getsourcelines(Samples.on_train_epoch_end)[1] + 3


def _sampled(rank, world_size):
    return outcome(
        lambda: train(world_size, lambda: Pets(lambda *_: "cat"), strategy(True), callbacks=[Samples()], max_epochs=2)
    )


@pytest.mark.slow
def test_a_forward_on_one_rank_alone_is_named():
    for said in run_in_processes(_sampled, 2, limit_s=360):
        assert said.startswith("refused: "), said
        assert f"in all_gather() (test_deepspeed_trace.py:{LINE})" in said or "in which rank 0 waits" in said, said
        assert f"test_deepspeed_trace.py:{LINE}" in said


class Penalty(Pets):
    """A penalty on the slope of what it computes."""

    def training_step(self, batch, batch_idx):
        x = batch[0].detach().requires_grad_()
        out = self(x, "cat")
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return loss_of(out, batch[1]) + 30 * slope.square().mean()


def _penalized(rank, world_size, gathers):
    return outcome(lambda: train(world_size, lambda: Penalty(None), strategy(gathers)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "gathers"),
    [*(pytest.param(*each, marks=WHERE_IT_CHANGED) for each in ((1, False), (1, True), (2, False))), (2, True)],
)
def test_gradients_of_gradients_are_refused(world_size, gathers):
    for said in run_in_processes(_penalized, world_size, gathers, limit_s=2 * TIMEOUT_S):
        assert said.startswith("refused: a gradient is computed with create_graph=True, and stage 3 releases"), said


class Compiled(Pets):
    """One layer is compiled, in one of two ways."""

    def __init__(self, how):
        super().__init__(lambda *_: "cat")
        if how == "method":
            self.cat.compile(backend="aot_eager")
        else:
            self.cat = torch.compile(self.cat, backend="aot_eager")


def _compiled(rank, world_size, how):
    return outcome(lambda: train(world_size, lambda: Compiled(how), strategy(False)))


@pytest.mark.parametrize("how", ["method", pytest.param("function", marks=WHERE_IT_CHANGED)])
def test_a_compiled_part_is_refused_at_the_start(how):
    for said in run_in_processes(_compiled, 2, how):
        assert said.startswith("refused: 'cat' is compiled, and stage 3 gathers"), said
