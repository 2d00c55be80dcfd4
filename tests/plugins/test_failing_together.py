"""What goes wrong on one rank is said on all of them, and nobody waits forever."""

from __future__ import annotations

import os
import types

import pytest
import torch

import stratagem as sg
from stratagem_process_group.torch_errors import explained
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _said(model, world_size, **arguments):
    """Train, and return what this rank says."""
    trainer = sg.Trainer(devices=world_size, **({"max_epochs": 1, "strategy": "ddp"} | QUIET | arguments))
    try:
        trainer.fit(model, part(joined_batches(6, 8), int(os.environ["RANK"]), world_size))
    except sg.StratagemError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class SavesAlone(sg.Callback):
    """The guard that every tutorial of other trainers shows, and that deadlocks there."""

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if batch_idx == 1 and trainer.is_global_zero:
            trainer.save_checkpoint("alone.ckpt")


def _save_alone(rank, world_size):
    import stratagem_trainer.trainer

    stratagem_trainer.fit_state.BARRIER_TIMEOUT_S = 1.0
    return _said(Net(), world_size, callbacks=[SavesAlone()])


@pytest.mark.slow
def test_saving_on_rank_0_alone_is_named_on_all_ranks():
    first, second = run_in_processes(_save_alone, 2)

    sentence = "save_checkpoint was called on rank 0 and on 1 of 2 ranks, not on rank 1; expected all ranks to call it"
    assert sentence in first
    assert sentence in second
    assert "look for an exception on a rank that is missing, and for loaders of different lengths" in first


class Raises(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            raise ValueError("out of order")
        return super().training_step(batch, batch_idx)


def _raise_on_one(rank, world_size):
    return _said(Raises(), world_size)


def test_an_error_on_one_rank_is_named_on_the_others():
    first, second = run_in_processes(_raise_on_one, 2)

    assert "rank 1 failed with ValueError: out of order" in first
    assert second == "ValueError: out of order"


class LogsDifferently(Net):
    def validation_step(self, batch, batch_idx):
        self.log("a" if self.global_rank else "b", 1.0, sync_dist=True)


def _log_differently(rank, world_size):
    trainer = sg.Trainer(strategy="ddp", devices=world_size, **QUIET)
    try:
        trainer.validate(LogsDifferently(), part(joined_batches(2, 8), rank, world_size))
    except sg.StratagemError as error:
        return str(error)
    return "nothing"


def test_different_metrics_on_different_ranks_are_refused_on_both():
    for said in run_in_processes(_log_differently, 2):
        assert "rank 1 and rank 0 logged different metrics with sync_dist=True (a, b)" in said


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


class Lazy(Net):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.LazyLinear(4), self.net[-1].__class__(4, 1))


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.jit.script(self.net[:3]), self.net[3:])


class Wrapping(torch.nn.Module):
    """Returns an object in which FSDP does not find tensors."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        return types.SimpleNamespace(x=self.last(torch.tanh(self.layer(x))))


class Hidden(Net):
    def __init__(self):
        super().__init__()
        self.first = Wrapping()

    def forward(self, x):
        return self.net(self.first(x).x)


FSDP = {"name": "fsdp", "auto_wrap_policy": {Wrapping}}
#: Models of others that a strategy cannot take, and what it says of them.
NOT_TAKEN = {
    "unused": (Unused, "ddp_find_unused_parameters_false", 'choose strategy="ddp_find_unused_parameters_true"'),
    "alias": (Unused, "ddp_find_unused_parameters_true", "nothing"),
    "lazy": (Lazy, "ddp", "the model has lazy layers, such as LazyLinear, whose parameters have no shape yet"),
    "scripted": (Scripted, "fsdp", "the model has a part that torch.jit.script compiled"),
    "own object": (
        Hidden,
        FSDP,
        "torch does not see that tensors leave this unit; expected units that take and return",
    ),
}


def _not_taken(rank, world_size):
    return {name: _said(make(), world_size, strategy=strategy) for name, (make, strategy, _) in NOT_TAKEN.items()}


@pytest.mark.slow
def test_what_a_strategy_does_not_take_is_explained():
    for said in run_in_processes(_not_taken, 2):
        for name, (_, _, words) in NOT_TAKEN.items():
            assert words in said[name], name


@pytest.mark.parametrize("raised_in", ["deepspeed.runtime", "program"])
def test_words_of_an_engine_are_explained_where_the_engine_raised_them(raised_in):
    with pytest.raises(TypeError) as found:
        exec("vars(1)", {"__name__": raised_in})

    said = str(explained(found.value))
    assert said.startswith(
        "a layer returned an object of a class with __slots__" if raised_in != "program" else "vars()"
    )


class None1(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 else loss


def _none(rank, world_size):
    return _said(None1(), world_size)


def test_a_missing_loss_on_one_rank_ends_both():
    first, second = run_in_processes(_none, 2)

    assert "training_step returned None on rank 1 of 2" in first
    assert "training_step returned None on rank 1 of 2" in second
