"""Gradients accumulate over as many batches as the epoch asks for; the training is that of a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import GlobalBatchSize, GradientAccumulationScheduler
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import ByHand, Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
SCHEDULE = {0: 4, 1: 3, 3: 1}


def plainly(batches, epochs):
    module = Net()
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer  # its momentum goes on
    for epoch in range(epochs):
        weights, _ = train_module_plainly(module, batches, SCHEDULE[max(e for e in SCHEDULE if e <= epoch)])
    return weights


def _train(rank, world_size, strategy, how, batches):
    arguments = {"accumulate_grad_batches": SCHEDULE} if how == "argument" else {
        "callbacks": GradientAccumulationScheduler(scheduling=SCHEDULE)
    }  # fmt: skip
    trainer = sg.Trainer(max_epochs=4, strategy=strategy, devices=world_size, **QUIET, **arguments)
    trainer.fit(Net(), share(trainer, batches))
    return weights_of(trainer), trainer.global_step


@pytest.mark.every_push("single_device-1-callback")
@pytest.mark.parametrize("how", ["argument", "callback"])
@pytest.mark.parametrize(("strategy", "world_size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_it_trains_as_a_plain_loop_does(strategy, world_size, how):
    batches = joined_batches(7, 24)
    expected = plainly(batches, 4)
    for weights, steps in run_in_processes(_train, world_size, strategy, how, batches):
        assert relative_difference(weights, expected) < 1e-6
        assert steps == 2 + 3 + 3 + 7


def test_the_trainer_tells_the_current_number():
    seen = []

    class Looks(sg.Callback):
        @sg.hookimpl
        def on_train_epoch_start(self, trainer):
            seen.append(trainer.accumulate_grad_batches)

    trainer = sg.Trainer(max_epochs=4, accumulate_grad_batches=SCHEDULE, callbacks=Looks(), **QUIET)
    trainer.fit(Net(), joined_batches(7, 8))
    assert seen == [4, 3, 3, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({5: 4}, "accumulate_grad_batches begins at epoch 5; expected a number for epoch 0 too; write {0: 1, 5: 4}"),
        ({0: 8, 5: 0}, "accumulate_grad_batches is 0 from epoch 5; expected at least 1"),
        ({0: 8, -1: 2}, "accumulate_grad_batches is 2 from epoch -1"),
        ({}, "accumulate_grad_batches begins at epoch"),
        (0, "accumulate_grad_batches is 0; expected at least 1"),
        ("4", "accumulate_grad_batches is '4'"),
        ({0: "8"}, "accumulate_grad_batches is "),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(value, message):
    with pytest.raises(ConfigError) as caught:
        sg.Trainer(accumulate_grad_batches=value, **QUIET)
    assert message in str(caught.value)


def test_twice_is_refused():
    callback = GradientAccumulationScheduler(scheduling={0: 2})
    trainer = sg.Trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=callback, **QUIET)
    with pytest.raises(
        ConfigError, match="accumulate_grad_batches is 4 and gradient_accumulation_scheduler sets it too"
    ):
        trainer.fit(Net(), joined_batches(2, 8))


def test_a_module_that_steps_by_hand_accumulates_by_hand():
    trainer = sg.Trainer(max_epochs=1, accumulate_grad_batches={0: 1, 1: 2}, **QUIET)
    with pytest.raises(ConfigError, match="accumulate_grad_batches is .* with ByHand.automatic_optimization = False"):
        trainer.fit(ByHand(), joined_batches(2, 8))


def test_from_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("accumulate_grad_batches: {0: 4, 2: 1}\nlogger: false\n")
    assert sg.Trainer.from_config(tmp_path / "run.yaml", accelerator="cpu").accumulate_grad_batches == 4


# --- The same samples in each step -------------------------------------------------------------------------------


def loader(batches, batch_size):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size)


def _train_by_samples(rank, world_size, samples, batch_size, batches):
    callback = GlobalBatchSize(samples=samples)
    trainer = sg.Trainer(max_epochs=2, strategy="ddp", devices=world_size, callbacks=callback, **QUIET)
    trainer.fit(Net(), loader(batches, batch_size))
    return weights_of(trainer), trainer.global_step, trainer.accumulate_grad_batches, trainer.effective_batch_size


@pytest.mark.every_push("1-24-1")
@pytest.mark.parametrize(("world_size", "batch_size", "factor"), [(1, 4, 6), (1, 24, 1), (2, 4, 3), (3, 4, 2)])
def test_a_global_batch_size_trains_alike_at_any_number_of_processes(world_size, batch_size, factor):
    batches = joined_batches(5, 24)
    module = Net()
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer
    for _ in range(2):
        expected, norms = train_module_plainly(module, batches)
    assert max(norms) > 1

    for weights, *numbers in run_in_processes(_train_by_samples, world_size, 24, batch_size, batches):
        assert relative_difference(weights, expected) < 1e-6
        assert numbers == [10, factor, 24]


@pytest.mark.parametrize(
    ("module", "data", "options", "message"),
    [
        (
            Net(),
            loader(joined_batches(2, 8), 16),
            {},
            r"samples is 24, and 1 x 16 samples are read at a time .*; expected a multiple of 16",
        ),
        (Net(), joined_batches(2, 8), {}, "samples is 24 and the training loader has no batch_size"),
        (
            Net(),
            loader(joined_batches(2, 8), 8),
            {"accumulate_grad_batches": 3},
            "accumulate_grad_batches is 3 and global",
        ),
        (ByHand(), loader(joined_batches(2, 8), 8), {}, "with ByHand.automatic_optimization = False"),
    ],
)
def test_a_global_batch_size_that_cannot_be_kept_is_refused(module, data, options, message):
    trainer = sg.Trainer(max_epochs=1, callbacks=GlobalBatchSize(samples=24), **QUIET, **options)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(module, data)
