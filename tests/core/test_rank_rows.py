"""What each rank saved, as one row of bytes for each rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.checkpoint import rank_rows
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.rank_rows import ranks_in
from stratagem.checkpoint.state_checks import check_structure
from stratagem.errors import CheckpointError, StratagemError
from stratagem.stack.formats import format_named, write_with
from stratagem_checkpoints.distinct import gather_distinct
from stratagem_testing import run_in_processes


def rows(*contents):
    """Return a tensor with these contents of rows, the shorter ones padded."""
    longest = max(map(len, contents))
    return torch.stack(
        [torch.frombuffer(bytearray(each.ljust(longest, b"\0")), dtype=torch.uint8) for each in contents]
    )


def saved(*states):
    return {"state_dict": {}, "ranks": rows(*(rank_rows._encoded(state, "ranks[0]") for state in states))}


def test_a_row_has_what_the_rank_saved():
    whole = torch.arange(100_000.0)
    state = {
        "mesh": {"data": 2}, "random": {"python": (3, (1, 2), None)}, "metrics": {"loss": (math.inf, torch.tensor(3))},
        "plugins": {"a": {1: whole[4:6], "dtype": torch.bfloat16}},
    }  # fmt: skip
    checkpoint = saved({"mesh": {}}, state)
    check_structure(checkpoint, "x.ckpt")
    ranks = ranks_in(checkpoint, "x.ckpt")
    assert ranks[0] == {"mesh": {}}
    found = ranks[1]
    assert torch.equal(found["plugins"]["a"].pop(1), whole[4:6])
    assert found == state | {"plugins": {"a": {"dtype": torch.bfloat16}}}
    assert checkpoint["ranks"].shape[1] < 10_000  # a view is saved without the rest of its memory


class OfAUser(torch.Tensor):
    pass


def test_tensors_are_read_as_plain_ones():
    ranks = ranks_in(saved({"plugins": {"a": torch.ones(2).as_subclass(OfAUser)}}), "x.ckpt")
    assert type(ranks[-1]["plugins"]["a"]) is torch.Tensor


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"x.ckpt: ranks\[1\] cannot be read"),
        ((1 << 60).to_bytes(8, "little") + b"text", r"x.ckpt: ranks\[1\] cannot be read"),
        (rank_rows._encoded({"random": "text"}, ""), r"ranks\[1\].random is a str; expected a mapping"),
        (rank_rows._encoded([1], ""), r"ranks\[1\] is a list; expected a mapping"),
    ],
)
def test_a_row_that_no_rank_wrote_is_refused(content, message):
    ranks = ranks_in({"ranks": rows(rank_rows._encoded({"mesh": {}}, ""), content)}, "x.ckpt")
    assert ranks[0] == {"mesh": {}}
    with pytest.raises(CheckpointError, match=message):
        ranks[1]


def test_another_tensor_is_not_what_ranks_saved():
    with pytest.raises(CheckpointError, match="ranks is a Tensor; expected a list of mappings"):
        check_structure({"state_dict": {}, "ranks": torch.zeros(3)}, "x.ckpt")


def _loads(rank, world_size, path):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        module = nn.Linear(2, 2)
        model, _ = run.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        try:
            run.load(path, model=model)
        except StratagemError as error:
            return str(error)
    return "nothing"


def test_a_damaged_row_fails_on_all_ranks_of_a_loop_of_ones_own(tmp_path):
    state = {
        "state_dict": nn.Linear(2, 2).state_dict(), "optimizers": [], "plugins": {},
        "ranks": rows(*[rank_rows._encoded({"plugins": {}}, "")] * 3, b"text"),
    }  # fmt: skip
    path = tmp_path / "x.ckpt"
    write_with(format_named("sharded"), state, path, SingleProcessRun())
    for told in run_in_processes(_loads, 2, path):
        assert "ranks[3] cannot be read" in told


def _distinct(rank, world_size):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        same = gather_distinct(run.collectives, ("all", 1))
        two = gather_distinct(run.collectives, ("stage", rank % 2))
        return same, two, gather_distinct(run.collectives, rank)


def test_each_different_value_comes_with_its_first_rank():
    for same, two, all_different in run_in_processes(_distinct, 3):
        assert same == [(0, ("all", 1))]
        assert two == [(0, ("stage", 0)), (1, ("stage", 1))]
        assert all_different == [(0, 0), (1, 1), (2, 2)]
