"""Layers whose inputs alone are kept until backward: by DeepSpeed's own way, by torch's and by the trainer's."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference
from stratagem_testing.training import outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES = joined_batches(6, 24)
STAGES = (2, 3)


class Block(nn.Module):
    """What is checkpointed; draws random numbers, which backward has to draw again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.2, training=self.training)


class Plain(Net):
    """Nothing is checkpointed; the reference."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 32), Block(), Block(), Block(), nn.Linear(32, 1))

    def forward(self, x):
        first, *blocks, last = self.net
        x = first(x)
        for block in blocks:
            x = self.through(block, x)
        return last(x)

    def through(self, block, x):
        return block(x)


class ByDeepSpeed(Plain):
    def through(self, block, x):
        import deepspeed

        return deepspeed.checkpointing.checkpoint(block, x)


class NotReentrant(Plain):
    def through(self, block, x):
        import deepspeed

        return deepspeed.checkpointing.non_reentrant_checkpoint(block, x)


class ByTorch(Plain):
    def through(self, block, x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


class ByTorchReentrant(Plain):
    def through(self, block, x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)


class Arranged(ByDeepSpeed):
    """Defines how its layers are checkpointed."""

    def configure_model(self):
        import deepspeed

        deepspeed.checkpointing.configure(None, partition_activations=True)


#: Options of the strategy, by which the inputs are kept in several ways.
WAYS = {
    "plain": {},
    "shared out": {"partition_activations": True},
    "on the CPU": {"cpu_checkpointing": True},
    "shared out, on the CPU": {"partition_activations": True, "cpu_checkpointing": True},
    "in one buffer": {
        "partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3,
    },
    "waiting": {"synchronize_checkpoint_boundary": True},
}  # fmt: skip


def _variables():
    from deepspeed.runtime.activation_checkpointing import checkpointing as module

    names = (
        "PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING", "SYNCHRONIZE", "num_layers",
        "deepspeed_checkpointing_enabled",
    )  # fmt: skip
    return {name: getattr(module, name) for name in names}, module.non_reentrant_checkpoint


def _train(rank, world_size, cases):
    """Train each case as DDP trains a plain model, with the same random numbers.

    Returns:
        For each case its distance from DDP, how layers were checkpointed, and whether that outlived the run.
    """
    expected, _, _ = _weights(Plain, "ddp", world_size, {})
    found = []
    for make, strategy, arguments in cases:
        weights, during, left = _weights(make, strategy, world_size, arguments)
        found.append((relative_difference(weights, expected), during, left))
    return found


class _Configured(sg.Callback):
    """Keeps how layers are checkpointed while a model trains."""

    def __init__(self):
        self.found = {}

    @sg.hookimpl
    def on_train_batch_end(self, run):
        if "deepspeed" in str(run.stack.strategy):
            self.found = _variables()[0]


def _weights(make, strategy, world_size, arguments):
    torch.manual_seed(7)
    configured = _Configured()
    trainer = sg.Trainer(strategy=strategy, devices=world_size, callbacks=[configured], **QUIET | arguments)
    before = _variables() if strategy != "ddp" and "deepspeed" in sys.modules else None
    trainer.fit(make(), share(trainer, BATCHES), share(trainer, BATCHES))
    weights = weights_of(trainer)
    trainer.close()
    return weights, configured.found, before is not None and before != _variables()


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_activations.py::test_what_cannot_work_or_has_no_effect_is_an_error",
)
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_layers_checkpointed_in_any_way_train_like_plain_ones(stage):
    strategies = [{"name": "deepspeed", "stage": stage, **way} for way in WAYS.values()]
    cases = [(ByDeepSpeed, strategy, {}) for strategy in strategies]
    cases += [(make, {"name": "deepspeed", "stage": stage}, {}) for make in (ByTorch, ByTorchReentrant, Arranged)]
    cases += [(Plain, {"name": "deepspeed", "stage": stage}, {"activation_checkpointing": {Block}})]

    for results in run_in_processes(_train, 2, cases, limit_s=360):
        for (make, strategy, _), (distance, configured, is_left) in zip(cases, results, strict=True):
            assert distance < 1e-6, (make.__name__, strategy)
            assert configured["PARTITION_ACTIVATIONS"] == (
                make is Arranged or strategy.get("partition_activations", False)
            )
            assert configured["CONTIGUOUS_CHECKPOINTING"] == strategy.get("contiguous_memory_optimization", False)
            assert configured["SYNCHRONIZE"] == strategy.get("synchronize_checkpoint_boundary", False)
            assert not is_left


def _outcomes(rank, world_size, cases):
    return [_outcome(world_size, make, strategy) for make, strategy in cases]


def _outcome(world_size, make, strategy):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    batches = share(trainer, BATCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended = outcome(lambda: trainer.fit(make(), batches))
    trainer.close()
    return ended, [str(warning.message) for warning in caught if "had no effect" in str(warning.message)]


@pytest.mark.slow
def test_what_cannot_work_or_has_no_effect_is_an_error():
    without_effect = {"name": "deepspeed", "stage": 2, "partition_activations": True}
    cases = [
        (NotReentrant, {"name": "deepspeed", "stage": 3}), (Plain, without_effect), (ByDeepSpeed, without_effect),
    ]  # fmt: skip

    first, second = run_in_processes(_outcomes, 2, cases)

    for refused, *trained in (first, second):
        assert refused[0].startswith("refused: the model calls deepspeed.checkpointing.non_reentrant_checkpoint")
        assert "torch.utils.checkpoint.checkpoint" in refused[0]
        assert [ended for ended, _ in trained] == ["nothing", "nothing"]
    assert [len(told) for _, told in first] == [0, 1, 0]
    assert [told for _, told in second] == [[], [], []]
    assert first[1][1][0].startswith("partition_activations had no effect on the first step")
