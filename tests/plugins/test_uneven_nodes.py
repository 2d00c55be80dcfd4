"""Nodes with different numbers of processes: they train, and what makes groups within a node refuses them."""

from __future__ import annotations

import os

import pytest

import stratagem as sg
from stratagem import World
from stratagem.api import Environment, hookimpl
from stratagem.api.validators import check_equal_nodes
from stratagem.errors import ConfigError
from stratagem.strategies import FSDPStrategy, LocalSGDStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import train

#: Ranks of each of two nodes.
NODES = ([0, 1, 2], [3])


class Uneven(Environment):
    """Processes of one machine that pass for those of two nodes."""

    def local_processes(self):
        return place(int(os.environ["RANK"])).local_world_size

    def num_nodes(self):
        return len(NODES)

    @hookimpl
    def setup_environment(self):
        return place(int(os.environ["RANK"]))


def place(rank, nodes=NODES):
    number = next(number for number, node in enumerate(nodes) if rank in node)
    return World(
        rank=rank, local_rank=nodes[number].index(rank), node_rank=number, world_size=sum(map(len, nodes)),
        local_world_size=len(nodes[number]), num_nodes=len(nodes), main_address="127.0.0.1",
        main_port=int(os.environ.get("MASTER_PORT", 1)), store_hosted=True,
    )  # fmt: skip


def _train(rank, size, strategy, batches):
    result = train(rank, size, Net, batches, {"strategy": strategy, "environment": Uneven(), "devices": "auto"})
    return result["weights"]


@pytest.mark.every_push("ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_uneven_nodes_train_as_one_process(strategy):
    batches = joined_batches(4, 24)
    expected, norms = train_module_plainly(Net(), batches)
    results = run_in_processes(_train, 4, strategy, batches, limit_s=360)

    assert max(norms) > 0.1
    assert all(relative_difference(weights, expected) < 1e-5 for weights in results)


@pytest.mark.parametrize("nodes", [NODES, ([0, 1, 2], [3, 4], [5]), ([0, 1], [2], [3])])
def test_groups_within_a_node_are_refused_on_every_rank(nodes):
    """A rank that went on would wait for the others."""
    inner = sg.Run(accelerator="cpu", strategy="ddp", devices=2).stack.strategy
    for rank in range(sum(map(len, nodes))):
        here = place(rank, nodes)
        with pytest.raises(
            ConfigError, match="team_size is not set, so a node is a team, and .* expected as many proce"
        ):
            LocalSGDStrategy().processes_per_team(here, inner)
        with pytest.raises(
            ConfigError, match="HYBRID_SHARD, so a node shares a replica, and .*; set strategy.fsdp.dev"
        ):
            FSDPStrategy(sharding_strategy="HYBRID_SHARD").mesh(here)
        assert LocalSGDStrategy(team_size=1).processes_per_team(here, inner) == 1


def test_ranks_that_go_round_the_nodes_make_no_groups():
    with pytest.raises(
        ConfigError, match="rank 1 is local rank 0 of node 1; expected as many processes on each node, "
    ):
        check_equal_nodes(place(1, ([0, 2], [1, 3])), "X", "set Y")


def test_equal_nodes_have_no_rank_that_is_refused():
    for rank in range(4):
        check_equal_nodes(place(rank, ([0, 1], [2, 3])), "", "")
