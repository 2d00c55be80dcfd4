"""Odd models and optimizers under DeepSpeed: trained as elsewhere, or refused with an error on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.strategies import DeepSpeedStrategy
from stratagem_callbacks.model_summary import layers, totals
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference
from stratagem_testing.training import outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES = joined_batches(4, 24)
#: Cases beside the most telling one.
WHERE_IT_CHANGED = pytest.mark.when_changed("plugins/deepspeed/")
PRESETS = (
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_1_offload",
    "deepspeed_stage_2_offload", "deepspeed_stage_3_offload",
)  # fmt: skip


def train(world_size, make, strategy):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    try:
        trainer.fit(make(), share(trainer, BATCHES))
        return weights_of(trainer)
    finally:
        trainer.close()


class Empty(Net):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))


class Integers(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)


class Narrow(Net):
    """One layer has 16 bits."""

    def __init__(self):
        super().__init__()
        self.net[2].to(torch.bfloat16)

    def forward(self, x):
        h = self.net[1](self.net[0](x))
        return self.net[4](self.net[3](self.net[2](h.bfloat16()).float()))


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.cfloat))


class Differing(Net):
    """The learning rate depends on the rank."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3 * (1 + self.global_rank))


class Fewer(Net):
    """Rank 1 leaves a layer out."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2 * self.global_rank :].parameters(), lr=5e-3)


REFUSED = {
    Integers: "SGD has the parameter 'table' of torch.int64",
    Narrow: "parameter 'net.2.weight' is torch.bfloat16, and DeepSpeed takes one dtype",
    Complex: "parameter 'phase' is torch.complex64",
    Differing: "configure_optimizers returned lr=0.01 in group 0 on rank 1 and lr=0.005 in group 0 on rank 0",
    Fewer: "configure_optimizers returned group 0 with net.2.weight",
}


def _all_refused(rank, world_size, strategy):
    models = REFUSED | ({Empty: "parameter 'empty' has no elements (shape (0, 3))"} if "3" in strategy else {})
    return {sentence: outcome(lambda make=make: train(world_size, make, strategy)) for make, sentence in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(f"deepspeed_stage_{stage}", marks=WHERE_IT_CHANGED) for stage in (1, 2)),
        "deepspeed_stage_3",
    ],
)
def test_what_cannot_be_trained_is_refused_on_all_ranks(strategy):
    for said in run_in_processes(_all_refused, 2, strategy, limit_s=360):
        for sentence, told in said.items():
            assert told.startswith("refused: "), f"{sentence}: {told}"
            assert sentence in told


def _empty(rank, world_size):
    expected = train(world_size, Empty, "ddp_find_unused_parameters_true")
    return [relative_difference(train(world_size, Empty, f"deepspeed_stage_{stage}"), expected) for stage in (1, 2)]


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_checks.py::test_what_cannot_be_trained_is_refused_on_all_ranks",
)
@pytest.mark.slow
def test_a_parameter_without_elements_is_trained_beside_below_stage_3():
    for distances in run_in_processes(_empty, 2, limit_s=360):
        assert max(distances) < 1e-6


class Counts(sg.Callback):
    """What the summary of a model counts."""

    @sg.hookimpl
    def on_fit_start(self, module):
        self.found = totals(module)["parameters"], sum(row[2] for row in layers(module, 1))


def _counted(rank, world_size):
    look = Counts()
    trainer = sg.Trainer(strategy="deepspeed_stage_3", devices=world_size, callbacks=[look], **QUIET)
    trainer.fit(Net(), share(trainer, BATCHES))
    trainer.close()
    return look.found


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_checks.py::test_a_scheduler_of_torch_is_made_on_the_prepared_optimizer",
)
@pytest.mark.slow
def test_the_summary_counts_whole_parameters_at_stage_3():
    size = sum(parameter.numel() for parameter in Net().parameters())

    assert run_in_processes(_counted, 2) == [(size, size), (size, size)]


# --- A model whose ranks take different ways -----------------------------------------------------------------------


class Pets(sg.Module):
    """Rank 0 uses one layer, rank 1 the other, of the same shape."""

    def __init__(self):
        super().__init__()
        self.cat, self.dog = nn.Linear(16, 1, bias=False), nn.Linear(16, 1, bias=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return loss_of((self.dog if self.global_rank else self.cat)(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def _pets(rank, world_size, strategy):
    torch.manual_seed(0)
    return outcome(lambda: train(world_size, Pets, strategy))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(each, marks=() if each == "deepspeed_stage_3_offload" else WHERE_IT_CHANGED) for each in PRESETS],
)
def test_ranks_that_take_different_ways_are_refused_under_every_preset(strategy):
    for said in run_in_processes(_pets, 2, strategy):
        assert said.startswith("refused: "), said
        assert "different parameters" in said or "different layers" in said


def _pets_without_zero(rank, world_size):
    weights = []
    for strategy in ({"name": "deepspeed", "stage": 0}, "ddp_find_unused_parameters_true"):
        torch.manual_seed(0)
        weights.append(train(world_size, Pets, strategy))
    return relative_difference(*weights)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_checks.py::test_ranks_that_take_different_ways_are_refused_under_every_preset",
)
@pytest.mark.slow
def test_stage_0_averages_what_each_rank_used():
    for distance in run_in_processes(_pets_without_zero, 2):
        assert distance < 1e-6


# --- Loops without a Trainer ------------------------------------------------------------------------------------


def _scheduled(rank, world_size, stage):
    run = sg.Run(strategy=DeepSpeedStrategy(stage=stage), devices=world_size, accelerator="cpu")
    module = Net()
    model, optimizer = run.setup(module, torch.optim.SGD(module.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    for x, y in BATCHES[:3]:
        run.backward(loss_of(model(x), y))
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
        scheduler.step()
        rates.append(run.model.engine.optimizer.param_groups[0]["lr"])
    said = outcome(lambda: run.optimizer_step(optimizer))
    run.close()
    return rates, said


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=WHERE_IT_CHANGED) for each in (1, 2)), 3])
def test_a_scheduler_of_torch_is_made_on_the_prepared_optimizer(stage):
    for rates, said in run_in_processes(_scheduled, 2, stage):
        assert rates == [5e-3, 2.5e-3, 1.25e-3]
        assert said.startswith("refused: an optimizer step was requested without a backward"), said
