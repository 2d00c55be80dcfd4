"""Sizes of the axes of a parallel strategy: the mesh they make, and those that are refused, on all ranks alike."""

from __future__ import annotations

import itertools

import pytest

import stratagem as sg
from stratagem.api import World
from stratagem.errors import ConfigError
from stratagem_parallel import ParallelStrategy, ddp_sequential, expert_parallel, pipeline_parallel, tensor_parallel
from stratagem_parallel.layout import SIZES, axis_of
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net
from stratagem_testing.training import QUIET


def world(size, per_node=None, rank=0):
    per_node = per_node or size
    return World(
        rank=rank, local_rank=rank % per_node, node_rank=rank // per_node, world_size=size, local_world_size=per_node,
        num_nodes=size // per_node,
    )  # fmt: skip


def sizes(strategy, *arguments):
    mesh = strategy.mesh(world(*arguments))
    return {size: mesh.size(axis_of(size)) for size in SIZES if mesh.size(axis_of(size)) > 1}


def refusal(strategy, *arguments):
    """Return the refusal, the same on each rank."""
    found = set()
    for rank in range(arguments[0]):
        with pytest.raises(ConfigError) as caught:
            strategy.mesh(world(*arguments, rank=rank))
        found.add(str(caught.value))
    (text,) = found
    return text


@pytest.mark.parametrize(
    ("options", "processes", "expected"),
    [
        ({}, 1, {}),
        ({}, 4, {"replicate": 4}),
        ({"tensor": 2}, 8, {"tensor": 2, "replicate": 4}),
        ({"tensor": 2, "shard": "auto"}, 8, {"tensor": 2, "shard": 4}),
        ({"tensor": 2, "shard": "auto", "replicate": 2}, 8, {"tensor": 2, "shard": 2, "replicate": 2}),
        ({"pipeline": "auto"}, 1, {}),
        (
            {"pipeline": 2, "expert": 2, "context": 2, "replicate": "auto"},
            8,
            {"pipeline": 2, "expert": 2, "context": 2},
        ),
    ],
)
def test_what_is_not_given_is_filled_up(options, processes, expected):
    assert sizes(ParallelStrategy(**options), processes) == expected


def test_every_position_is_held_once_and_tensor_is_innermost():
    strategy = ParallelStrategy(pipeline=2, shard=2, tensor=2)
    meshes = [strategy.mesh(world(8, None, rank)) for rank in range(8)]
    positions = [tuple(mesh.position(axis) for axis in ("pipeline", "shard", "tensor")) for mesh in meshes]
    assert positions == list(itertools.product(range(2), repeat=3))
    assert meshes[0].lines("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [mesh.data_shard for mesh in meshes] == [0, 0, 1, 1] * 2  # pipeline and tensor read the same samples
    assert meshes[0].num_data_shards == 2


@pytest.mark.parametrize(
    ("options", "processes", "words"),
    [
        ({"tensor": 3}, 4, ["tensor 3", "4 processes", "a divisor of 4"]),
        ({"tensor": 2, "shard": 2, "replicate": 2}, 4, ["replicate 2 x shard 2 x tensor 2", "a product of 4"]),
        ({"tensor": 8}, 4, ["tensor 8", "a divisor of 4"]),
        ({"pipeline": 2, "replicate": 1}, 4, ["pipeline 2", "a product of 4"]),
        ({"shard": "auto", "replicate": "auto"}, 4, ["strategy.parallel.replicate", "strategy.parallel.shard", "both"]),
        ({"pipeline": 2}, 1, ["pipeline 2", "1 process;"]),
        ({"replicate": 1}, 2, ["every size 1", "2 processes"]),
    ],
)
def test_sizes_that_are_not_the_world_are_refused(options, processes, words):
    text = refusal(ParallelStrategy(**options), processes)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0, -2, 2.5, True, "two", "Auto", [2]])
def test_a_size_is_a_number_from_1_or_auto(size, value):
    with pytest.raises(ConfigError, match=rf"strategy\.parallel\.{size} is .*expected a number from 1, or 'auto'"):
        ParallelStrategy(**{size: value})


def test_the_name_of_a_size_is_found_if_misspelt():
    with pytest.raises(ConfigError, match="tensor"):
        sg.Trainer(strategy={"name": "parallel", "tensors": 2}, **QUIET)


@pytest.mark.parametrize(("tensor", "per_node"), [(4, 2), (3, 2), (2, 3)])
def test_tensor_stays_within_a_node(tensor, per_node):
    processes = 12
    text = refusal(ParallelStrategy(tensor=tensor), processes, per_node)
    assert f"strategy.parallel.tensor is {tensor} and a node has {per_node} processes" in text
    assert "tensor_across_nodes" in text
    across = ParallelStrategy(tensor=tensor, tensor_across_nodes=True)
    assert sizes(across, processes, per_node) == {"tensor": tensor, "replicate": processes // tensor}


def test_ranks_that_go_round_the_nodes_are_refused():
    strategy = ParallelStrategy(tensor=2)
    there = World(rank=1, local_rank=0, node_rank=1, world_size=4, local_world_size=2, num_nodes=2)
    with pytest.raises(ConfigError, match="rank 1 is local rank 0 of node 1"):
        strategy.mesh(there)


def test_presets_fill_the_world():
    assert sizes(tensor_parallel(), 4) == {"tensor": 4}
    assert sizes(tensor_parallel(), 8, 4) == {"tensor": 4, "replicate": 2}  # a replica on each node
    assert sizes(pipeline_parallel(), 8, 4) == {"pipeline": 8}
    assert sizes(expert_parallel(), 4) == {"expert": 4}
    assert sizes(ddp_sequential(), 4) == {"pipeline": 2, "replicate": 2}
    assert "3 processes" in refusal(ddp_sequential(), 3)


def _refused(rank, world_size, options):
    with pytest.raises(ConfigError) as caught:
        sg.Trainer(strategy=options, devices=world_size, accelerator="cpu", **QUIET).fit(Net(), [])
    return str(caught.value)


@pytest.mark.parametrize("options", [{"name": "parallel", "tensor": 2}, "ddp_sequential"])
def test_all_ranks_refuse_a_run_with_the_same_words(options):
    (text,) = set(run_in_processes(_refused, 3, options))
    assert "3 processes" in text


@pytest.mark.parametrize("options", [{"tensor": 2}, {"context": "auto"}])
def test_what_is_not_installed_is_named_before_any_process_starts(options, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    ParallelStrategy(pipeline=2, shard=2, expert=2)

    with pytest.raises(ConfigError, match=f"{[*options][-1]} needs the package stratagem-parallel-unchanged"):
        ParallelStrategy(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_dim": 2}, ["context_dim is 2", "context is 1"]),
        ({"context_method": "ulysses", "tensor": 2}, ["context_method is 'ulysses'", "context is 1"]),
        ({"context_tensors": ["x"]}, ["context_tensors", "context above 1"]),
        ({"check_parts": False}, ["check_parts is False"]),
        ({"plan": {"up": "colwise"}}, ["plan", "tensor is 1 and expert is 1"]),
        ({"plan": "auto", "shard": 2}, ["plan is 'auto'", "tensor is 1"]),
        ({"tensor_across_nodes": True}, ["tensor_across_nodes is True", "set tensor, or drop"]),
        ({"auto_wrap_policy": {Net}}, ["auto_wrap_policy", "shard is 1"]),
        ({"reshard_after_forward": False}, ["reshard_after_forward is False", "shard above 1"]),
        ({"plan": {"a": "expert", "b": "colwise"}, "expert": 2}, ["the style 'colwise', and tensor is 1", "'expert'"]),
        ({"plan": "auto", "expert": 2}, ["the style 'auto', and tensor is 1"]),
    ],
)
def test_an_option_without_effect_is_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        ParallelStrategy(**options)
    assert [word for word in words if word not in str(caught.value)] == []


def test_options_of_axes_that_may_have_one_rank_are_accepted():
    ParallelStrategy(tensor="auto", plan="auto", shard="auto", auto_wrap_policy={Net})
    ParallelStrategy(expert=2, plan={"a": "expert"})
    ParallelStrategy(expert=2, tensor=2, plan={"a": "expert", "b": "colwise"})
