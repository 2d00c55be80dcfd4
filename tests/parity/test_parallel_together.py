"""Meshes of several axes train as one process does."""

from __future__ import annotations

import functools

import pytest
import torch
from parallel_models import GPT, Block, StackedGPT, texts, train_plainly
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
#: Batches per step and the largest norm.
WINDOWS = ((1, None), (1, 0.5), (3, None), (3, 0.5))
#: The same in two parts, each with and without accumulation and clipping: one of them is left to ``make test-all``.
PARTS = {"both or none": (WINDOWS[0], WINDOWS[3]), "one of them": (WINDOWS[1], WINDOWS[2])}
BATCHES, TEXTS = joined_batches(7, 24), texts(7, 8)  # the last window is short
PLAN = {
    "*.attention.[qkv]": "colwise", "*.attention.out": "rowwise", "*.up": "colwise", "*.down": "rowwise",
}  # fmt: skip
VOCAB = PLAN | {"*tokens": "vocab", "head": "vocab"}
STACKED_VOCAB = PLAN | {"*.tokens": "vocab", "*.logits": "vocab"}


def _double(make):
    """Return a function that makes the model in double precision: sums over more ranks have other orders."""
    return lambda: make().double()


def _train(make, world_size, options, batches, accumulate, max_norm, **arguments):
    trainer = sg.Trainer(
        strategy={"name": "parallel", **options}, devices=world_size, accumulate_grad_batches=accumulate,
        gradient_clip_val=max_norm, **QUIET | arguments,
    )  # fmt: skip
    trainer.fit(make(), share(trainer, batches))
    return weights_of(trainer)


def _on_rank(rank, world_size, make, options, batches, windows):
    return [_train(make, world_size, options, batches, *window) for window in windows]


def _check(world_size, make, options, batches, train_plainly, windows=WINDOWS):
    plain = [train_plainly(make(), batches, *window) for window in windows]
    assert all(max(norms) > 1 for _, norms in plain)
    for found in run_in_processes(_on_rank, world_size, make, options, batches, windows, limit_s=900):
        distances = [relative_difference(*pair) for pair in zip(found, (weights for weights, _ in plain), strict=True)]
        assert max(distances) < 1e-6, dict(zip(windows, distances, strict=True))


@pytest.mark.every_push("shard 2-one unit")
@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["one unit", "units"])
@pytest.mark.parametrize(
    "options",
    [
        {"shard": 2}, {"shard": 4}, {"shard": 2, "replicate": 2},
        {"shard": 2, "replicate": 2, "reshard_after_forward": False, "bucket_cap_mb": 0.001},
    ],
    ids=["shard 2", "shard 4", "shard 2, replicate 2", "shard 2, replicate 2, small buckets"],
)  # fmt: skip
def test_shards(options, policy):
    world_size = 4 if options != {"shard": 2} else 2
    _check(world_size, Net, options | {"auto_wrap_policy": policy}, BATCHES, train_module_plainly)


AT_4 = {
    "tensor x shard": {"tensor": 2, "shard": 2, "plan": PLAN, "auto_wrap_policy": {Block}},
    "tensor x shard, vocabulary": {"tensor": 2, "shard": 2, "plan": VOCAB, "auto_wrap_policy": {Block}},
    "tensor x shard, one unit": {"tensor": 2, "shard": 2, "plan": VOCAB},
    "tensor x replicate": {"tensor": 2, "replicate": 2, "plan": VOCAB},
    "tensor x context": {"tensor": 2, "context": 2, "plan": PLAN},
    "shard x context": {"shard": 2, "context": 2, "auto_wrap_policy": {Block}},
    "shard x context, by all-gather": {"shard": 2, "context": 2, "context_method": "all_gather"},
}


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/parity/test_parallel_together.py::test_pipelines_and_another_axis",
)
@pytest.mark.every_push("one of them-shard x context, by all-gather")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", AT_4)
@pytest.mark.parametrize("part", PARTS)
def test_two_axes(mesh, part):
    _check(4, _double(GPT), AT_4[mesh], TEXTS, train_plainly, PARTS[part])


PIPELINES_AT_4 = {
    "pipeline x shard": {"pipeline": 2, "shard": 2, "microbatches": 4},
    "pipeline x shard, units": {"pipeline": 2, "shard": 2, "auto_wrap_policy": {nn.Linear}, "schedule": "gpipe"},
    "pipeline x shard, kept": {"pipeline": 2, "shard": 2, "reshard_after_forward": False},
    "pipeline x shard, zero bubble": {"pipeline": 2, "shard": 2, "microbatches": 4, "schedule": "zero_bubble_v"},
    "pipeline x shard, recomputed": {"pipeline": 2, "shard": 2, "checkpoint": "always"},
    "pipeline x replicate": {"pipeline": 2, "replicate": 2},
    "pipeline x context": {"pipeline": 2, "context": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2, "plan": STACKED_VOCAB},
    "pipeline x tensor, sequences": {
        "pipeline": 2,
        "tensor": 2,
        "plan": STACKED_VOCAB | {"*.norm*": "sequence"},
        "checkpoint": "always",
    },
}


@pytest.mark.when_changed(
    "plugins/parallel/", "plugins/parallel_unchanged/", cases=("one of them-pipeline x shard, kept",)
)
@pytest.mark.every_push(
    "one of them-pipeline x shard, kept",
    "one of them-pipeline x replicate",
)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", PIPELINES_AT_4)
@pytest.mark.parametrize("part", PARTS)
def test_pipelines_and_another_axis(mesh, part):
    # Two layers of one stage have the weight that another stage has, too.
    make = functools.partial(StackedGPT, centered=mesh == "pipeline x shard, kept")
    _check(4, _double(make), PIPELINES_AT_4[mesh], TEXTS, train_plainly, PARTS[part])


@pytest.mark.sweep(guard="tests/parity/test_parallel_together.py::test_pipelines_and_another_axis")
def test_pipelines_of_parts_of_sequences_count_targets_of_all():
    texts_of_other_lengths = [
        (ids, following.masked_fill(torch.arange(12) > (torch.arange(8)[:, None] + index) % 11, -100))
        for index, (ids, following) in enumerate(TEXTS)
    ]
    options = {"pipeline": 2, "context": 2, "microbatches": 4}
    _check(4, _double(StackedGPT), options, texts_of_other_lengths, train_plainly, ((1, None), (3, 0.5)))


AT_8 = {
    "tensor x pipeline x shard": {"tensor": 2, "pipeline": 2, "shard": 2, "plan": PLAN},
    "tensor x pipeline x replicate": {"tensor": 2, "pipeline": 2, "replicate": 2, "plan": STACKED_VOCAB},
    "tensor x shard x replicate": {"tensor": 2, "shard": 2, "replicate": 2, "plan": STACKED_VOCAB},
}


@pytest.mark.sweep(guard="tests/parity/test_parallel_together.py::test_pipelines_and_another_axis")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", AT_8)
def test_three_axes(mesh):
    _check(8, _double(StackedGPT), AT_8[mesh], TEXTS, train_plainly, ((1, 0.5), (3, 0.5)))
