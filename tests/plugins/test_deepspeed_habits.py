"""What users of DeepSpeed under Lightning do: an optimizer in two places, conversion of any checkpoint, frozen parts."""

from __future__ import annotations

import warnings

import pytest
import torch

import stratagem as sg
from stratagem.errors import CheckpointError, ConfigError
from stratagem.strategies import DeepSpeedStrategy
from stratagem_deepspeed import convert_zero_checkpoint_to_fp32_state_dict as convert
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES = joined_batches(3, 24)
CONFIG = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}


class WithoutOptimizer(Net):
    configure_optimizers = sg.Module.configure_optimizers


class WithScheduler(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


def fit(module, world_size=1, **options):
    trainer = sg.Trainer(strategy=DeepSpeedStrategy(**options), devices=world_size, **QUIET)
    trainer.fit(module, share(trainer, BATCHES))
    return trainer


def optimizers_in_two_places(rank, world_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both = weights_of(fit(Net(), world_size, config=CONFIG))
    said = [str(each.message) for each in caught if "is not used" in str(each.message)]
    alone = weights_of(fit(WithoutOptimizer(), world_size, config=CONFIG))
    try:
        fit(WithScheduler(), world_size, config=CONFIG)
    except ConfigError as error:
        return relative_difference(both, alone), said, str(error)
    return None


@pytest.mark.slow
def test_the_optimizer_of_the_configuration_goes_first():
    first, second = run_in_processes(optimizers_in_two_places, 2)

    for difference, _, refusal in (first, second):
        assert difference == 0
        assert "two optimizers: SGD of configure_optimizers, with ConstantLR, and AdamW" in refusal
    assert first[1] == ["SGD of configure_optimizers is not used: AdamW is"]
    assert second[1] == []


def save(rank, world_size, folder):
    trainer = fit(Net(), world_size, stage=3)
    trainer.save_checkpoint(folder / "whole.ckpt")
    return weights_of(trainer)


@pytest.mark.slow
def test_a_checkpoint_that_is_whole_is_converted_too(tmp_path):
    weights = run_in_processes(save, 2, tmp_path)[0]
    convert(tmp_path / "whole.ckpt", tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt")

    assert relative_difference(found["state_dict"], weights) == 0
    assert "optimizers" not in found
    for options, name in (({"tag": "x"}, "tag"), ({"exclude_frozen_parameters": True}, "exclude_frozen_parameters")):
        with pytest.raises(CheckpointError, match=f"is not a folder of DeepSpeed's, and {name} was given"):
            convert(tmp_path / "whole.ckpt", tmp_path / "two.ckpt", **options)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_habits.py::test_a_checkpoint_that_is_whole_is_converted_too",
)
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parts_that_are_left_out_stay_where_workers_train(start_method, stage):
    module, before = Frozen(), Frozen().net[0].weight.detach().clone()
    launcher = {"launcher": start_method} | QUIET
    strategy = DeepSpeedStrategy(stage=stage, exclude_frozen_parameters=True)
    sg.Trainer(strategy=strategy, devices=2, **launcher).fit(module, BATCHES)
    reference = Frozen()
    sg.Trainer(strategy=DeepSpeedStrategy(stage=stage), devices=2, **launcher).fit(reference, BATCHES)

    assert torch.equal(module.net[0].weight, before)
    assert relative_difference(module.state_dict(), reference.state_dict()) == 0
    assert not torch.equal(module.net[2].weight, Frozen().net[2].weight)
