"""Batches that take another layer on each rank: every strategy, stack of hooks and meeting is right, or refuses."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.discovery import registry
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Branching,
    BranchingInSize,
    BranchingLater,
    branching_batches,
    part,
    relative_difference,
    train_branching_plainly,
)
from stratagem_testing.training import QUIET, outcome, share, weights_of

BATCHES = branching_batches(6, 24, 2)
MODELS = (Branching, BranchingLater, BranchingInSize)
FIND = {"name": "ddp", "find_unused_parameters": True}
UNITS = {"auto_wrap_policy": {nn.Linear}, "timeout": 20}

#: Equal to one process that averages the losses of the ranks' parts.
RIGHT = {
    "ddp, search": (FIND, None),
    "ddp": ("ddp", None),
    "ddp, search, views": (FIND | {"gradient_as_bucket_view": True}, None),
    "ddp, search, small buckets": (FIND | {"bucket_cap_mb": 0.001}, None),
    "ddp_sharded": ("ddp_sharded", None),
    "ddp, hook": (FIND, "allreduce"),
    "ddp, small buckets, hook": (FIND | {"bucket_cap_mb": 0.001}, "allreduce"),
    "ddp_sharded, hook": ("ddp_sharded", "allreduce"),
    "ddp_sharded, small buckets, hook": ({"name": "ddp_sharded", "bucket_cap_mb": 0.001}, "allreduce"),
    "ddp, everything is sent": (FIND, {"name": "topk", "ratio": 1.0}),
    "ddp, one bit, later": (FIND, {"name": "one_bit", "start_iter": 99}),
    "ddp, low rank, later": (FIND, {"name": "powersgd", "start_powerSGD_iter": 99}),
    "post_localsgd, later": (
        FIND, {"name": "post_localsgd", "model_averaging_period": 2, "subgroup_size": 1, "start_localSGD_iter": 99},
    ),
}  # fmt: skip
#: Refused on both ranks, with one of these words.
REFUSED = {
    "ddp": ("ddp_find_unused_parameters_false", None, "got no gradient"),
    "ddp, static": ({"name": "ddp", "static_graph": True}, None, "static_graph is true"),
    "ddp, hook": ("ddp_find_unused_parameters_false", "int8", "got no gradient"),
    "fsdp": ({"name": "fsdp", "timeout": 20}, None, "ranks use different layers"),
    "fsdp, units": ({"name": "fsdp", **UNITS}, None, "ranks use different layers"),
    "fsdp, replicas": (
        {"name": "fsdp", "sharding_strategy": "NO_SHARD", "timeout": 20}, None, "ranks use different layers",
    ),
    "fsdp, replicas, hook": (
        {"name": "fsdp", "sharding_strategy": "NO_SHARD", "timeout": 20}, "int8", "ranks use different layers",
    ),
}  # fmt: skip
#: Something is lost on the way, and comes later: both ranks hold the same model, near the exact one.
LOSSY = {
    f"{strategy}, {hook}": (choice, {"name": hook, **options})
    for strategy, choice in (("ddp", FIND), ("ddp_sharded", "ddp_sharded"))
    for hook, options in (
        ("fp16_compress", {}), ("bf16_compress", {}), ("int8", {}), ("one_bit", {"start_iter": 1}),
        ("topk", {"ratio": 0.5}), ("powersgd", {"start_powerSGD_iter": 2, "min_compression_rate": 1}),
        ("batched_powersgd", {"start_powerSGD_iter": 2}),
    )
}  # fmt: skip


#: How far those may be from it that send little of a bucket, as a share of the way from where training began.
COARSE = {"one_bit": 1.0, "batched_powersgd": 1.5}


def _fit(make, strategy, hook, **arguments):
    trainer = sg.Trainer(strategy=strategy, comm_hook=hook, devices=2, accelerator="cpu", **(QUIET | arguments))
    trainer.fit(make(), share(trainer, BATCHES))
    weights = weights_of(trainer)
    trainer.close()
    return weights


def _train_all(rank, size, stacks, models=MODELS):
    return {
        (name, make.__name__): _fit(make, strategy, hook)
        for name, (strategy, hook) in stacks.items()
        for make in models
    }


def test_a_static_graph_is_right_where_each_rank_keeps_its_layers():
    models = (Branching, BranchingInSize)
    stacks = {hook: ({"name": "ddp", "static_graph": True}, hook) for hook in (None, "allreduce")}
    for results in run_in_processes(_train_all, 2, stacks, models):
        for (hook, name), weights in results.items():
            make = Branching if name == "Branching" else BranchingInSize
            assert relative_difference(weights, train_branching_plainly(make(), BATCHES, 2)[0]) < 1e-6, (name, hook)


@pytest.mark.slow
def test_what_trains_ranks_that_differ_equals_one_process():
    first, second = run_in_processes(_train_all, 2, RIGHT, limit_s=450)

    for make in MODELS:
        plain, norms = train_branching_plainly(make(), BATCHES, 2)
        assert max(norms) > 1
        for name in RIGHT:
            for weights in (first[name, make.__name__], second[name, make.__name__]):
                assert relative_difference(weights, plain) < 1e-6, (name, make)


@pytest.mark.sweep(guard="tests/parity/test_branching.py::test_what_trains_ranks_that_differ_equals_one_process")
@pytest.mark.slow
def test_lossy_hooks_keep_the_gradients_of_different_layers_apart():
    first, second = run_in_processes(_train_all, 2, LOSSY, limit_s=450)

    for make in MODELS:
        plain, _ = train_branching_plainly(make(), BATCHES, 2)
        start = make().state_dict()
        for name in LOSSY:
            weights = first[name, make.__name__]
            assert all(torch.equal(weights[key], second[name, make.__name__][key]) for key in weights), (name, make)
            for key, value in plain.items():  # nearer to what exact averages make than to where training began
                moved = float((value - start[key]).norm())
                limit = next((far for hook, far in COARSE.items() if hook in name), 0.8)
                assert float((weights[key] - value).norm()) < limit * moved + 1e-4, (name, make, key)


def _refused(rank, size, strategy, hook, make):
    return outcome(lambda: _fit(make, strategy, hook))


@pytest.mark.every_push("fsdp, replicas, hook-BranchingLater")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [(name, make) for name in REFUSED for make in MODELS if name != "ddp, static" or make is BranchingLater],
)
def test_what_cannot_train_them_says_so_on_all_ranks(make, name):
    strategy, hook, words = REFUSED[name]

    for said in run_in_processes(_refused, 2, strategy, hook, make, limit_s=180):
        assert said.startswith("refused: "), said
        assert words in said, said


# --- Windows of several batches ----------------------------------------------------------------------------------

#: In a window of two batches each rank takes both layers, in another order.
WINDOWS = RIGHT | {
    "fsdp": ({"name": "fsdp", "timeout": 20}, None),
    "fsdp, replicas": ({"name": "fsdp", "sharding_strategy": "NO_SHARD", "timeout": 20}, None),
    "fsdp, replicas, hook": ({"name": "fsdp", "sharding_strategy": "NO_SHARD", "timeout": 20}, "allreduce"),
}


def alternating():
    batches = branching_batches(6, 24, 2)
    for x, _ in batches[1::2]:
        x[:, 0] *= -1
    return batches


def alike():
    """Return batches of which all ranks take one layer, and the other one in the next batch."""
    batches = branching_batches(6, 24, 2)
    for index, (x, _) in enumerate(batches):
        x[:, 0] = (-1.0) ** index
    return batches


ORDERS = (alternating, alike)


def _train_windows(rank, size):
    found = {}
    for order, (name, (strategy, hook)) in itertools.product(ORDERS, WINDOWS.items()):
        arguments = {"strategy": strategy, "comm_hook": hook, "devices": size, "accelerator": "cpu"}
        trainer = sg.Trainer(accumulate_grad_batches=2, gradient_clip_val=1.0, **(QUIET | arguments))
        trainer.fit(Branching(), share(trainer, order()))
        found[order, name] = weights_of(trainer)
        trainer.close()
    return found


def _windows_plainly(order):
    plain = Branching()
    optimizer = plain.configure_optimizers()
    for index, batch in enumerate(order()):
        for rank in range(2):
            (plain.training_step(part([batch], rank, 2)[0], index) / 4).backward()
        if index % 2 == 1:
            assert nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 1
            optimizer.step()
            optimizer.zero_grad()
    return plain.state_dict()


@pytest.mark.slow
def test_what_a_window_reaches_in_any_order_is_averaged_whole():
    plain = {order: _windows_plainly(order) for order in ORDERS}

    for results in run_in_processes(_train_windows, 2, limit_s=300):
        for (order, name), weights in results.items():
            assert relative_difference(weights, plain[order]) < 1e-6, (order.__name__, name)


# --- Parts of a batch in one process -----------------------------------------------------------------------------


def _parts(rank, size, find):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=str(rank), GROUP_RANK=str(rank))
    strategy = {"name": "ddp2", "find_unused_parameters": find} if size > 1 else "dp"
    found = {}
    for make in MODELS:
        trainer = sg.Trainer(strategy=strategy, devices=2, num_nodes=size, accelerator="cpu", **QUIET)
        said = outcome(lambda: trainer.fit(make(), share(trainer, BATCHES)))  # noqa: B023
        found[make.__name__] = weights_of(trainer) if said == "nothing" else said
        if said != "nothing":
            break  # the processes are no longer in step
        trainer.close()
    return found


@pytest.mark.every_push("1")
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_a_batch_may_take_different_layers(size):
    for results in run_in_processes(_parts, size, True, limit_s=180):
        for make in MODELS:
            plain, _ = train_branching_plainly(make(), BATCHES, 2)
            assert relative_difference(results[make.__name__], plain) < 1e-6, make


def test_nodes_that_do_not_search_for_them_say_so():
    for results in run_in_processes(_parts, 2, False, limit_s=180):
        assert "refused: " in results["Branching"]
        assert "got no gradient" in results["Branching"]


# --- Teams -------------------------------------------------------------------------------------------------------

MEETINGS = {
    "local_sgd": {"name": "local_sgd", "period": 2},
    "diloco": {"name": "diloco", "period": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
    "decentralized": {"name": "decentralized", "period": 2},
    "decentralized, random": {"name": "decentralized", "period": 2, "topology": "random"},
    "async_averaging": {"name": "async_averaging", "interval_steps": 2, "delay_steps": 1},
}


def _meet_all(rank, size):
    return {(name, make.__name__): _fit(make, strategy, None) for name, strategy in MEETINGS.items() for make in MODELS}


def apart(make, late):
    """Train two models on their own parts; average them every other step, a step `late` if asked to."""
    models = [make(), make()]
    optimizers = [model.configure_optimizers() for model in models]
    parameters = [list(model.parameters()) for model in models]
    due = None
    for index, batch in enumerate(BATCHES):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.training_step(part([batch], rank, 2)[0], index).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if due is not None:
                for mine, changes in zip(parameters, due, strict=True):
                    for parameter, change in zip(mine, changes, strict=True):
                        parameter.add_(change)
                due = None
            if index % 2 == 1:
                sent = [[p.clone() for p in mine] for mine in parameters]
                means = [(a + b) / 2 for a, b in zip(*sent, strict=True)]
                changes = [[mean - p for mean, p in zip(means, mine, strict=True)] for mine in sent]
                if late:
                    due = changes
                else:
                    for mine in parameters:
                        for parameter, mean in zip(mine, means, strict=True):
                            parameter.copy_(mean)
    first, second = (copy.deepcopy(model.state_dict()) for model in models)
    return {name: (first[name] + second[name]) / 2 for name in first}


@pytest.mark.when_changed(
    "plugins/outer/", guard="tests/plugins/test_outer.py::test_training_equals_copies_that_meet_by_hand"
)
@pytest.mark.slow
def test_teams_that_use_different_layers_meet_as_models_do_by_hand():
    """A team's layer that it never used is averaged too: as it is."""
    first, second = run_in_processes(_meet_all, 2, limit_s=300)

    for make in MODELS:
        for name in MEETINGS:
            plain = apart(make, late=name == "async_averaging")
            for weights in (first[name, make.__name__], second[name, make.__name__]):
                assert relative_difference(weights, plain) < 1e-6, (name, make)


# --- None is left out --------------------------------------------------------------------------------------------


def test_every_strategy_is_tried_here_or_under_the_kit():
    """Presets are a strategy here with options set; the kit tries each of them by name."""
    classes = {
        type(sg.Run(strategy=s, accelerator="cpu").stack.strategies[0].plugin).__name__ for s in MEETINGS.values()
    }
    stacks = [strategy for strategy, *_ in (*RIGHT.values(), *REFUSED.values())]
    classes |= {type(sg.Run(strategy=s, accelerator="cpu", devices=2).stack.strategy).__name__ for s in stacks}
    # See test_strategies.py, and test_parallel.py beside it.
    elsewhere = {"SingleDeviceStrategy", "DPStrategy", "DDP2Strategy", "DeepSpeedStrategy", "ParallelStrategy"}

    for entry in registry.entries("strategy"):
        if entry.distribution.startswith("stratagem-"):
            made = entry.load()
            name = made.__name__ if isinstance(made, type) else type(made()).__name__
            assert name in classes | elsewhere, entry.name
