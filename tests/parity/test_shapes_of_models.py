"""Frozen, tied and unusual parameters, buffers and uneven batches train under DDP as in one process."""

from __future__ import annotations

import os

import pytest
import torch

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Buffered,
    Frozen,
    Scalar,
    Tied,
    joined_batches,
    part,
    relative_difference,
    train_module_plainly,
)

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
