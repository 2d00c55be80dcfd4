"""Frozen, tied and unusual parameters, buffers and uneven batches train under DDP as in one process."""

from __future__ import annotations

import os

import pytest
import torch

import stratagem as sg
from models import Net, joined_batches, loss_of, part, relative_difference
from processes import run_in_processes

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class Tied(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        shared = torch.nn.Linear(32, 32)
        self.net = torch.nn.Sequential(
            self.net[0], torch.nn.Tanh(), shared, torch.nn.Tanh(), shared, torch.nn.Tanh(), self.net[4]
        )


class Scalar(Net):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.gain * self.net(x)


class Counting(Net):
    """A buffer that every rank counts in alike."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        return self.net(x)


def reference(cls, batches):
    model = cls()
    optimizer = model.configure_optimizers()
    for x, y in batches:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _fit(rank, world_size, cls, batches):
    model = cls()
    trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, **QUIET)
    trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cls", [Frozen, Tied, Scalar, Counting])
def test_equals_one_process(cls, world_size):
    batches = joined_batches(8, 12)

    ranks = run_in_processes(_fit, world_size, cls, batches)

    assert relative_difference(ranks[0], reference(cls, batches)) < 1e-6
    assert all(torch.equal(ranks[0][name], rank[name]) for rank in ranks for name in rank)
