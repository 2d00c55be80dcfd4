"""Frozen, tied and unusual parameters, buffers and uneven batches train under DDP as in one process."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Buffered,
    Frozen,
    Net,
    Scalar,
    Tied,
    joined_batches,
    part,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _fit(rank, world_size, cls, batches):
    model = cls()
    trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, **QUIET)
    trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.every_push("Buffered-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cls", [Frozen, Tied, Scalar, Buffered])
def test_equals_one_process(cls, world_size):
    batches = joined_batches(8, 12)

    ranks = run_in_processes(_fit, world_size, cls, batches)

    assert relative_difference(ranks[0], train_module_plainly(cls(), batches)[0]) < 1e-6
    assert all(torch.equal(ranks[0][name], rank[name]) for rank in ranks for name in rank)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Lists(Net):
    """Lists of lists with gaps, and one layer that forward repeats."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.pairs = nn.ModuleList([nn.ModuleList([Block(), None]), nn.ModuleList([Block(), Block()])])
        self.shared, self.out = nn.ModuleList([Block()]), nn.Linear(16, 1)

    def forward(self, x):
        for first, second in self.pairs:
            x = first(x) if second is None else second(first(x))
        for _ in range(3):
            x = self.shared[0](x)
        return self.out(x)


def _fit_lists(rank, world_size, batches):
    found = {}
    for name, strategy in {"fsdp": "fsdp", "shard": {"name": "parallel", "shard": 2}}.items():
        model = Lists()
        trainer = sg.Trainer(
            max_epochs=1, strategy={"auto_wrap_policy": "blocks"} | (strategy if name == "shard" else {"name": name}),
            devices=world_size, **QUIET,
        )  # fmt: skip
        trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
        found[name] = weights_of(trainer), len(trainer.run.ask("units", module=model))
    return found


def test_units_are_found_in_lists_of_lists():
    batches = joined_batches(6, 12)
    plain, _ = train_module_plainly(Lists(), batches)

    for weights, units in run_in_processes(_fit_lists, 2, batches)[0].values():
        assert units == 4
        assert relative_difference(weights, plain) < 1e-6
