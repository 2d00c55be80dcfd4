"""Small messages between hosts need log2(n) rounds, whatever they are and however many ranks there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import stratagem as sg
from stratagem_testing import run_in_processes


def _talk(rank, world_size):
    sent = []
    send = dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    def refuse(*_, **__):
        raise AssertionError("sent around a ring")

    dist.isend = counted
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        everybody, alone = run.collectives, run.collectives.unchecked
        dist.all_reduce = dist.all_gather = refuse
        begun = len(sent)
        found = {
            "max": everybody.all_reduce(torch.tensor([rank, -rank]), "max").tolist(),
            "min": alone.all_reduce(torch.tensor([[0.5 * rank], [-rank]]), "min").tolist(),
            "nan": alone.all_reduce(torch.tensor([rank, 0.0 if rank else float("nan")]), "max").tolist(),
            "any": (alone.any(rank == world_size - 1), alone.any(False)),
            "gathered": [part.tolist() for part in alone.all_gather(torch.tensor([rank, 7]))],
            "columns": [part.tolist() for part in alone.all_gather(torch.tensor([[rank, 1], [2, 3]]).T)],
            "numbers": [part.item() for part in alone.all_gather(torch.tensor(rank * 1j))],
            "flags": [part.item() for part in alone.all_gather(torch.tensor(rank == 1))],
            "empty": [len(part) for part in alone.all_gather(torch.zeros(0))],
        }
        everybody.barrier()
        found["messages"] = len(sent) - begun
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rounds"), [(2, 1), (5, 3)])
@pytest.mark.every_push("5-3")
def test_a_small_message_reaches_all_ranks_in_rounds(world_size, rounds):
    for found in run_in_processes(_talk, world_size):
        last, ranks = world_size - 1, range(world_size)
        assert found["max"] == [last, 0]
        assert found["min"] == [[0.0], [-last]]
        assert found["nan"][0] == last
        assert found["nan"][1] != found["nan"][1]
        assert found["any"] == (True, False)
        assert found["gathered"] == [[rank, 7] for rank in ranks]
        assert found["columns"] == [[[rank, 2], [1, 3]] for rank in ranks]
        assert found["numbers"] == [rank * 1j for rank in ranks]
        assert found["flags"] == [rank == 1 for rank in ranks]
        assert found["empty"] == [0] * world_size
        assert found["messages"] == rounds * 13  # of 11 calls: two of them compare first


def _send_much(rank, world_size):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        much = torch.full((2**17,), rank)
        gathered = run.collectives.all_gather(much)
        return run.collectives.all_reduce(much, "max").unique().tolist(), [part.unique().item() for part in gathered]


def test_a_large_message_goes_around_a_ring():
    assert run_in_processes(_send_much, 3) == [([2], [0, 1, 2])] * 3
