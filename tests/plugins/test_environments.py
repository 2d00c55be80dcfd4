"""Environments read a process's place from its variables, and refuse what contradicts the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stratagem import World
from stratagem.environments import LocalEnvironment, TorchElasticEnvironment
from stratagem.errors import ConfigError

local = pytest.importorskip("stratagem_environments_local")


@pytest.mark.parametrize(
    ("variables", "local_size", "num_nodes", "expected"),
    [
        ({}, 1, 1, World()),
        ({}, 2, 1, World(world_size=2, local_world_size=2)),
        (
            {"LOCAL_RANK": "1", "MASTER_PORT": "29500", "STRATAGEM_STORE_HOSTED": "1"}, 2, 1,
            World(rank=1, local_rank=1, world_size=2, local_world_size=2, main_port=29500, store_hosted=True),
        ),
        (
            {"MASTER_ADDR": "h1", "MASTER_PORT": "1", "NODE_RANK": "1", "LOCAL_RANK": "1"}, 2, 2,
            World(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="h1",
                  main_port=1),
        ),
        (
            {"MASTER_ADDR": "h1", "MASTER_PORT": "1", "GROUP_RANK": "1"}, 1, 2,
            World(rank=1, node_rank=1, world_size=2, num_nodes=2, main_address="h1", main_port=1),
        ),
    ],
)  # fmt: skip
def test_local_places(variables, local_size, num_nodes, expected):
    assert local.local_world(variables, local_size, num_nodes) == expected


@pytest.mark.parametrize(
    ("variables", "local_size", "num_nodes", "message"),
    [
        ({}, 1, 2, "num_nodes is 2 and MASTER_ADDR, MASTER_PORT, NODE_RANK are not set"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "2"}, 1, 2, "NODE_RANK is 2 and num_nodes is 2"),
        ({"LOCAL_RANK": "2"}, 2, 1, "LOCAL_RANK is 2 and the run has 2 processes"),
        ({"WORLD_SIZE": "4"}, 2, 1, "WORLD_SIZE is 4 and devices x num_nodes is 2 x 1"),
        ({"LOCAL_RANK": "one"}, 1, 1, "LOCAL_RANK is 'one'; expected a whole number"),
        ({"LOCAL_RANK": "²"}, 1, 1, "LOCAL_RANK is '²'; expected a whole number"),
        ({"GROUP_RANK": "1"}, 1, 2, "num_nodes is 2 and MASTER_ADDR, MASTER_PORT are not set"),
        ({"LOCAL_RANK": "0"}, 2, 1, "LOCAL_RANK is set, as if all 2 processes existed, and MASTER_PORT is not"),
    ],
)
def test_local_contradictions_are_refused(variables, local_size, num_nodes, message):
    with pytest.raises(ConfigError, match=message):
        local.local_world(variables, local_size, num_nodes)


ELASTIC = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def test_torchrun_decides():
    assert local.elastic_world(ELASTIC, None) == World(
        rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="h1",
        main_port=1234, store_hosted=True,
    )  # fmt: skip


def test_attempts_are_told_apart_where_one_agent_counts_them():
    alone = {**ELASTIC, "LOCAL_WORLD_SIZE": "4"}

    assert local.elastic_world(alone, None).generation == "2"
    assert local.elastic_world(ELASTIC, None).generation == "0"


def test_devices_that_contradict_torchrun_are_refused():
    with pytest.raises(ConfigError, match="devices x num_nodes is 2 and torchrun started 4 processes"):
        local.elastic_world(ELASTIC, 2)


def test_nodes_with_different_numbers_of_processes_are_counted_by_torchrun():
    uneven = {**ELASTIC, "WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    assert local.elastic_world({**uneven, "GROUP_WORLD_SIZE": "2"}, None).num_nodes == 2


def test_a_number_of_nodes_that_contradicts_torchrun_is_refused(monkeypatch):
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    run = SimpleNamespace(num_processes=2, devices_given=False, settings=SimpleNamespace(num_nodes=3))

    with pytest.raises(ConfigError, match="num_nodes is 3 and torchrun has 2"):
        TorchElasticEnvironment().setup_environment(run=run)
    run.settings.num_nodes = 1
    assert TorchElasticEnvironment().setup_environment(run=run).num_nodes == 2


def test_without_the_agents_store_rank_0_hosts_it():
    assert not local.elastic_world({**ELASTIC, "TORCHELASTIC_USE_AGENT_STORE": "False"}, None).store_hosted


def test_missing_variables_of_torchrun_are_named():
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR not set"):
        local.elastic_world({}, None)


def test_detection(monkeypatch):
    assert TorchElasticEnvironment().detect() is None
    assert not LocalEnvironment().processes_exist()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")

    assert TorchElasticEnvironment().detect() == "TORCHELASTIC_RUN_ID is set"
    assert TorchElasticEnvironment().local_processes() == 2
    assert TorchElasticEnvironment.precedence > LocalEnvironment.precedence
    assert LocalEnvironment().processes_exist()
