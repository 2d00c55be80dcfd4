"""Tensor and sequence parallelism train as one process does, with models that do not know of them."""

from __future__ import annotations

import functools

import pytest
import torch
from parallel_models import GPT, Attention, Block, Llama, texts, train_plainly
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES, TEXTS = joined_batches(7, 24), texts(7, 4)  # the last window is short
PLAIN = {"net.0": "colwise", "net.2": "rowwise"}
LAYERS = {
    "layers.*.attention.[qkv]": "colwise", "layers.*.attention.out": "rowwise",
    "layers.*.up": "colwise", "layers.*.down": "rowwise",
}  # fmt: skip
VOCAB = {"tokens": "vocab", "head": "vocab"}
NORMS = {"layers.*.norm_?": "sequence", "norm": "sequence"}
PLANS = {
    "layers": LAYERS, "vocab": LAYERS | VOCAB, "sequence": LAYERS | NORMS, "all": LAYERS | VOCAB | NORMS,
    "auto": "auto",
}  # fmt: skip
#: Clipping hides what accumulation multiplies: each has a window of its own.
WINDOWS = [(1, 0.5), (3, None)]


class Penalized(Net):
    """Adds how steep its output is, which is differentiated a second time."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = self.net(x)
        return out, *torch.autograd.grad(out.sum(), x, create_graph=True)

    def criterion(self, found, y):
        out, slope = found
        return super().criterion(out, y) + slope.square().sum(1).mean()


#: Plans for it: with a sum of summands, and with parts that are made whole for parts and for a layer that is not cut.
PENALIZED = (PLAIN, {"net.0": "colwise", "net.2": "colwise"})


def _train(rank, world_size, make, batches, plan, windows=((1, None),), **arguments):
    found = []
    for accumulate, max_norm in windows:
        trainer = sg.Trainer(
            strategy={"name": "parallel", "tensor": world_size, "plan": plan}, devices=world_size,
            accumulate_grad_batches=accumulate, gradient_clip_val=max_norm, **QUIET | arguments,
        )  # fmt: skip
        trainer.fit(make(), share(trainer, batches))
        found.append(weights_of(trainer))
    return found


def _train_plain_layers(rank, world_size):
    found = _train(rank, world_size, Net, BATCHES, PLAIN, WINDOWS)
    for plan in PENALIZED:
        found += _train(rank, world_size, Penalized, BATCHES, plan, WINDOWS[:1])
    return found


@pytest.mark.every_push("2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_plain_layers_that_are_cut_train_as_one_process(world_size):
    plain = [train_module_plainly(Net(), BATCHES, *window) for window in WINDOWS]
    assert all(max(norms) > 1 for _, norms in plain)

    plain += [train_module_plainly(Penalized(), BATCHES, *WINDOWS[0])] * len(PENALIZED)
    for found in run_in_processes(_train_plain_layers, world_size):
        for weights, (reference, _) in zip(found, plain, strict=True):
            assert relative_difference(weights, reference) < 1e-6


@pytest.mark.every_push("layers-2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_gpt_with_tied_embeddings_trains_as_one_process(plan, world_size):
    windows = WINDOWS if plan == "all" else [(3, 0.5)]
    plain = [train_plainly(GPT(), TEXTS, *window) for window in windows]
    assert all(max(norms) > 1 for _, norms in plain)

    for found in run_in_processes(_train, world_size, GPT, TEXTS, PLANS[plan], windows):
        for weights, (reference, _) in zip(found, plain, strict=True):
            assert relative_difference(weights, reference) < 1e-6


@pytest.mark.sweep(guard="tests/parity/test_parallel_together.py::test_pipelines_and_another_axis")
@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_that_do_not_divide_are_computed_whole(heads):
    make = functools.partial(GPT, heads=heads)
    reference, _ = train_plainly(make(), TEXTS)

    for (weights,) in run_in_processes(_train, 4, make, TEXTS, PLANS["all"]):
        assert relative_difference(weights, reference) < 1e-6


@pytest.mark.usefixtures("transformers_preloaded")
@pytest.mark.every_push("2-False")
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "tied"), [(2, False), (2, True), (4, True)])
def test_a_llama_of_hugging_face_trains_with_the_plan_that_it_carries(world_size, tied):
    make = functools.partial(Llama, tied)
    reference, norms = train_plainly(make(), TEXTS)
    assert max(norms) > 1

    for (weights,) in run_in_processes(_train, world_size, make, TEXTS, None):
        assert relative_difference(weights, reference) < 1e-6


def _meshes(rank, world_size, sizes, plan, arguments):
    trainer = sg.Trainer(
        strategy={"name": "parallel", "plan": plan} | sizes, devices=world_size, **QUIET | arguments,
    )  # fmt: skip
    trainer.fit(GPT(), share(trainer, TEXTS))
    return weights_of(trainer)


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/parity/test_parallel_together.py::test_pipelines_and_another_axis",
)
@pytest.mark.every_push("shard blocks")
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "replicate": 2},
        {"tensor": 2, "shard": 2},
        {"tensor": 2, "shard": 2, "auto_wrap_policy": {Block}},
        {"tensor": 2, "shard": 2, "auto_wrap_policy": {Attention, nn.LayerNorm}},
    ],
    ids=["replicate", "shard", "shard blocks", "shard layers"],
)
def test_a_gpt_trains_on_meshes_of_two_axes(sizes):
    reference, _ = train_plainly(GPT(), TEXTS, 3, 0.5)
    arguments = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}

    for weights in run_in_processes(_meshes, 4, sizes, PLANS["all"], arguments):
        assert relative_difference(weights, reference) < 1e-6
