"""Two DDP processes train exactly what one process trains on the joined batch."""

from __future__ import annotations

import os

import pytest
import torch

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Gan,
    Lbfgs,
    Net,
    joined_batches,
    part,
    relative_difference,
    square,
    train_gan_plainly,
    train_lbfgs_plainly,
    train_plainly,
)

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def fit(module, batches, **arguments):
    """Fit on this rank's part of `batches`; return the weights by plain names."""
    trainer = sg.Trainer(**({"max_epochs": 1} | QUIET | arguments))
    mine = part(batches, int(os.environ.get("RANK", "0")), trainer.world_size)
    trainer.fit(module, mine)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, trainer.global_step


def _ddp(rank, world_size, batches, arguments):
    return fit(Net(), batches, strategy="ddp", devices=world_size, **arguments)


@pytest.mark.every_push("value-3")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "clip",
    [{}, {"gradient_clip_val": 1.0}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}],
    ids=["unclipped", "norm", "value"],
)
def test_two_processes_equal_one_on_the_joined_batch(accumulate, clip):
    batches = joined_batches(20, 32)
    limits = {"max_norm": clip.get("gradient_clip_val")} if "gradient_clip_algorithm" not in clip else {}
    limits |= {"max_value": 0.1} if "gradient_clip_algorithm" in clip else {}
    reference, norms = train_plainly(batches, accumulate, **limits)
    options = {"accumulate_grad_batches": accumulate, **clip}

    (first, steps), (second, _) = run_in_processes(_ddp, 2, batches, options)

    assert max(norms) > 1
    assert steps == -(-20 // accumulate)
    assert relative_difference(first, reference) < 1e-6
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_one_process_equals_plain_pytorch(strategy):
    batches = joined_batches(20, 32)
    reference, _ = train_plainly(batches)

    weights, _ = fit(Net(), batches, strategy=strategy)

    assert relative_difference(weights, reference) < 1e-7


@pytest.mark.every_push("static_graph")
@pytest.mark.parametrize(
    "options",
    [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001},
     {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_change_nothing_in_the_result(options):
    batches = joined_batches(8, 16)
    reference, _ = train_plainly(batches)

    (weights, _), _ = run_in_processes(_ddp_with, 2, batches, options)

    assert relative_difference(weights, reference) < 1e-6


def _ddp_with(rank, world_size, batches, options):
    return fit(Net(), batches, strategy={"name": "ddp", **options}, devices=world_size)


def _gan(rank, world_size, batches):
    return fit(Gan(), batches, strategy="ddp", devices=world_size)[0]


def test_gan_with_two_optimizers_equals_plain_pytorch():
    batches = joined_batches(12, 16)
    reference = train_gan_plainly(batches)

    alone = fit(Gan(), batches, strategy="single_device")[0]
    together, _ = run_in_processes(_gan, 2, batches)

    assert relative_difference(alone, reference) < 1e-7
    assert relative_difference(together, reference) < 1e-6


class ManualLbfgs(Lbfgs):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = square(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def _lbfgs(rank, world_size, batches, cls):
    return fit(cls(), batches, strategy="ddp", devices=world_size)[0]


@pytest.mark.every_push("ManualLbfgs")
@pytest.mark.parametrize("cls", [Lbfgs, ManualLbfgs])
def test_lbfgs_equals_plain_pytorch(cls):
    batches = [tuple(tensor.double() for tensor in batch) for batch in joined_batches(4, 32)]
    reference = train_lbfgs_plainly(batches)

    alone = fit(cls(), batches, strategy="single_device")[0]
    together, _ = run_in_processes(_lbfgs, 2, batches, cls)

    assert relative_difference(alone, reference) < 1e-7
    assert relative_difference(together, reference) < 1e-6


def _traffic(rank, world_size, batches, accumulate):
    counter = Counting()
    fit(Net(), batches, strategy="ddp", devices=world_size, accumulate_grad_batches=accumulate, comm_hook=[counter],
        plugins=[counter.watcher()])  # fmt: skip
    return counter.by_batch


class Counting(sg.CommHook):
    def __init__(self) -> None:
        self.sent, self.by_batch = 0, []

    @sg.hookimpl
    def reduce_bucket(self, bucket):
        self.sent += 1
        return (yield bucket.buffer)

    def watcher(self):
        hook = self

        class Watcher:
            @sg.hookimpl
            def on_train_batch_end(self):
                hook.by_batch.append(hook.sent)
                hook.sent = 0

        return Watcher()


def test_inner_micro_batches_send_nothing():
    by_batch, _ = run_in_processes(_traffic, 2, joined_batches(7, 8), 3)

    assert [count > 0 for count in by_batch] == [False, False, True, False, False, True, True]
