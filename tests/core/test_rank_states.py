"""Which of the saved ranks a rank continues with."""

from __future__ import annotations

import math

import pytest
import torch

from stratagem.api.world import Mesh
from stratagem.errors import CheckpointError
from stratagem_trainer.rank_states import check_meshes, with_the_same_samples


def saved(axes, size, **others):
    return [{"mesh": axes, "number": n, "buffers": {}, "feed": {}, "metrics": {"n": n}, **others} for n in range(size)]


def numbers(ranks, axes, size):
    found = [with_the_same_samples(ranks, Mesh(axes=axes, rank=rank)) for rank in range(size)]
    return [each and each["number"] for each in found]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"data": 2, "tensor": 2}, {"data": 2, "tensor": 2}, [0, 1, 2, 3]),
        ({"data": 2, "tensor": 2}, {"pipeline": 2, "data": 2}, [0, 2, 0, 2]),
        ({"pipeline": 2, "data": 2}, {"shard": 2}, [0, 1]),
        ({"data": 1}, {"pipeline": 2, "tensor": 2}, [0, 0, 0, 0]),
        ({"tensor": 4}, {"tensor": 2}, [0, 0]),
        ({"tensor": 2}, {"data": 2}, [None, None]),
        ({"shard": 2}, {"tensor": 2}, [None, None]),
        ({"team": 2, "tensor": 2}, {"data": 2}, [0, 2]),
    ],
)
def test_a_rank_continues_with_one_that_had_its_samples(before, now, expected):
    assert numbers(saved(before, math.prod(before.values())), now, len(expected)) == expected


def test_before_meshes_were_saved_every_rank_had_other_samples():
    ranks = [{"number": n, "buffers": {}, "feed": {}, "metrics": {}} for n in range(2)]
    assert numbers(ranks, {"data": 2}, 2) == [0, 1]
    assert numbers(ranks, {"tensor": 2}, 2) == [None, None]


def test_buffers_of_all_stages_are_joined():
    ranks = saved({"pipeline": 2, "data": 2}, 4)
    for n, rank in enumerate(ranks):
        name = "first" if n < 2 else "second"
        rank["buffers"] = {name: torch.tensor(n)}
        rank["feed"] = {"marks": {}, "window": {"start": 1, "buffers": {name: torch.tensor(10 + n)}}}
    found = with_the_same_samples(ranks, Mesh(axes={"data": 2}, rank=1))
    assert {name: int(value) for name, value in found["buffers"].items()} == {"first": 1, "second": 3}
    assert {name: int(value) for name, value in found["feed"]["window"]["buffers"].items()} == {
        "first": 11,
        "second": 13,
    }
    assert "second" not in ranks[1]["feed"]["window"]["buffers"]


def test_metrics_of_parts_of_samples_are_not_taken_for_those_of_all():
    ranks = saved({"context": 2}, 2)
    assert with_the_same_samples(ranks, Mesh(axes={"context": 2}, rank=1))["metrics"] == {"n": 1}
    assert with_the_same_samples(ranks, Mesh(axes={"tensor": 2}, rank=1))["metrics"] == {}


@pytest.mark.parametrize(
    "axes", [{"tensor": 3}, {"tensor": "2"}, {"tensor": True, "data": 2}, {"tensor": -1, "data": -2}, [2]]
)
def test_what_is_not_a_mesh_is_refused(axes):
    with pytest.raises(CheckpointError, match=r"x.ckpt: ranks\[0\].mesh is") as caught:
        check_meshes(saved(axes, 2), range(2), "x.ckpt")
    assert "sizes whose product is 2" in str(caught.value)


def test_ranks_of_different_meshes_are_refused():
    ranks = saved({"tensor": 2}, 2)
    ranks[1]["mesh"] = {"data": 2}
    with pytest.raises(CheckpointError, match=r"ranks\[1\].mesh is {'data': 2}.*that of rank 0"):
        check_meshes(ranks, range(len(ranks)), "x.ckpt")
