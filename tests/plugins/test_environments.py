"""Environments read a process's place from its variables, and refuse what contradicts the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import stratagem as sg
from stratagem import World
from stratagem.api import Evidence
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
        ({"MASTER_PORT": "99999"}, 2, 1, "MASTER_PORT is 99999; expected a port from 1 to 65535; export"),
        ({"MASTER_PORT": "0"}, 2, 1, "MASTER_PORT is 0; expected a port"),
        ({"MASTER_PORT": "-1"}, 2, 1, "MASTER_PORT is '-1'; expected a whole number, 0 or more"),
        ({"MASTER_PORT": ""}, 2, 1, "MASTER_PORT is ''; expected a whole number"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2.0"}, 2, 1, "WORLD_SIZE is '2.0'; expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, 2, 1, "RANK is 2 and WORLD_SIZE is 2; expected 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, 2, 1, "RANK is '-1'; expected a whole number, 0 or more"),
        ({"WORLD_SIZE": "0"}, 2, 1, "WORLD_SIZE is 0; expected at least 1"),
        (
            {"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, 2, 1,
            "RANK is 1 and LOCAL_RANK is 0 on the only node; expected the same number",
        ),
        (
            {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "STRATAGEM_STORE_HOSTED": "1"}, 1, 1,
            "an earlier run of this program started 2 processes, and this one has devices x num_nodes = 1 x 1; "
            "expected the same number: .* give every Trainer of a program the same devices",
        ),
        (
            {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "STRATAGEM_STORE_HOSTED": "1"}, 1, 1,
            "an earlier run of this program started 2 processes",
        ),
    ],
)  # fmt: skip
def test_local_contradictions_are_refused(variables, local_size, num_nodes, message):
    with pytest.raises(ConfigError, match=message):
        local.local_world(variables, local_size, num_nodes)


#: What each starter tells a task of two. On several nodes they tell more, which does not matter here.
STARTED = {
    "srun": {
        "SLURM_JOB_ID": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0",
    },
    "old srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    "srun with pmix": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "MPICH": {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "5", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
    "Intel MPI": {"PMI_SIZE": "2", "PMI_RANK": "1", "I_MPI_MPIRUN": "mpirun"},
    "jsrun": {"LSB_JOBID": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_LOCAL_RANK": "0"},
    "Horovod": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"},
    "PyTorchJob": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"},
    "Kubeflow Trainer": {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
    "elastic Kubeflow Trainer": {"PET_NNODES": "1:2", "PET_NODE_RANK": "0"},
    "PMIx alone": {"PMIX_RANK": "0"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "1"},
    "PALS": {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1"},
}


@pytest.mark.parametrize("starter", STARTED)
def test_several_tasks_that_no_environment_reads_are_refused(monkeypatch, starter):
    """Each of them would train a model of its own, without an error."""
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "slurm,mpi,kubeflow,lsf")
    for name, value in STARTED[starter].items():
        monkeypatch.setenv(name, value)
    run = sg.Run(accelerator="cpu", devices=1)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set; expected RANK, LOCAL_RANK") as caught:
        run.launch(lambda run: run.rank)

    named = [name for name in STARTED[starter] if f"{name} is {STARTED[starter][name]!r}" in str(caught.value)]
    assert named
    unread = starter in ("PMIx alone", "Flux", "PALS")
    allow = "let STRATAGEM_PLUGINS and STRATAGEM_DISABLE_PLUGINS allow its environment"
    how = "run `pip install stratagem-horovod`" if starter == "Horovod" else allow
    how = "install an environment plugin for it" if unread else how
    assert f"{how}, start each process with torchrun" in str(caught.value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # it would contradict devices=1
    assert sg.Run(accelerator="cpu", devices=1, environment="local").launch(lambda run: run.world_size) == 1


@pytest.mark.parametrize("starter", [name for name in STARTED if "Kubeflow" not in name and name != "PyTorchJob"])
def test_a_local_rank_alone_does_not_make_a_world(monkeypatch, starter):
    """LOCAL_RANK is the rank of a process on its node, and says nothing about the other tasks there."""
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "slurm,mpi,kubeflow,lsf")
    for name, value in (STARTED[starter] | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="several times, and devices x num_nodes is 1; expected RANK, LOCAL_RANK"):
        sg.Run(accelerator="cpu", devices=1).launch(lambda run: run.rank)

    complete = dict(STARTED[starter], LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_PORT="1")
    if any(name.endswith(("SIZE", "NTASKS", "NUM_TASKS")) for name in STARTED[starter]):
        with pytest.raises(ConfigError, match="is '2'.* and devices x num_nodes is 1"):
            local.check_single_start(complete, 1, 1)
    local.check_single_start(complete | {"WORLD_SIZE": "2"}, 1, 2)
    local.check_single_start(STARTED[starter] | {"LOCAL_RANK": "1"}, 1, 2)
    local.check_single_start(complete | {"STRATAGEM_STORE_HOSTED": "1"}, 1, 1)  # a launcher of this program started it
    assert sg.Run(accelerator="cpu", devices=1, environment="local").launch(lambda run: run.world_size) == 1


def test_every_variable_of_a_starter_counts_alone():
    """Half of what a starter sets is refused as well: nobody knows what the other half would have been."""
    for _, sizes, rank, evidence in local._STARTERS:
        names = [evidence or rank] if rank == "RANK" or evidence else [rank, *sizes]
        for name in names:
            with pytest.raises(ConfigError, match=f"{name} is '3'"):
                local.check_single_start({name: "3"}, 1)


@pytest.mark.parametrize(
    ("variables", "num_nodes"),
    [
        ({}, 1),
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}, 1),  # a shell of salloc
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 1),  # a script of sbatch
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, 1),
        ({"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "4", "LSB_MCPU_HOSTS": "a 4"}, 1),  # a script of bsub
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, 1),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}, 1),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, 1),
        ({"WORLD_SIZE": "2"}, 1),
        (STARTED["srun"] | {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 2),  # one launch on each node
        (STARTED["srun"] | {"LOCAL_RANK": "1"}, 1),
    ],
)
def test_one_task_shells_and_complete_variables_run(variables, num_nodes):
    local.check_single_start(variables, num_nodes)


ELASTIC = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip


def test_torchrun_decides():
    assert local.elastic_world(ELASTIC) == World(
        rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="h1",
        main_port=1234, store_hosted=True, generation=None, may_restart=True,
    )  # fmt: skip


def test_ranks_agree_on_a_generation_only_in_the_store_of_an_agent():
    own_store = {**ELASTIC, "TORCHELASTIC_USE_AGENT_STORE": "False"}

    assert local.elastic_world(ELASTIC).generation is None
    assert local.elastic_world(own_store).generation == "0"


def test_processes_start_again_if_torchrun_may_restart_them():
    assert local.elastic_world(ELASTIC).may_restart
    assert not local.elastic_world({**ELASTIC, "TORCHELASTIC_MAX_RESTARTS": "0"}).may_restart


def test_devices_that_contradict_torchrun_are_refused(monkeypatch):
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="devices is 3 and torchrun started 2 processes on this node; expected the same"
    ):
        sg.Run(accelerator="cpu", devices=3).launch(lambda run: None)
    run = sg.Run(accelerator="cpu", devices=2)  # and num_nodes is read

    assert (run.stack.num_nodes, run.place.world_size) == (2, 4)


def test_nodes_with_different_numbers_of_processes_are_counted_by_torchrun():
    uneven = {**ELASTIC, "WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    assert local.elastic_world({**uneven, "GROUP_WORLD_SIZE": "2"}).num_nodes == 2


def test_a_number_of_nodes_that_contradicts_torchrun_is_refused(monkeypatch):
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    stack, settings = SimpleNamespace(devices_given=False), SimpleNamespace(num_nodes=3)
    run = SimpleNamespace(num_processes=2, stack=stack, settings=settings)

    with pytest.raises(ConfigError, match="num_nodes is 3 and torchrun has 2"):
        TorchElasticEnvironment().setup_environment(run=run)
    run.settings.num_nodes = 1
    assert TorchElasticEnvironment().setup_environment(run=run).num_nodes == 2


def test_without_the_agents_store_rank_0_hosts_it():
    assert not local.elastic_world({**ELASTIC, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store_hosted


def test_missing_variables_of_torchrun_are_named():
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR not set"):
        local.elastic_world({})


def test_detection(monkeypatch):
    assert TorchElasticEnvironment().detect() is None
    assert not LocalEnvironment().processes_exist()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")

    assert TorchElasticEnvironment().detect() == Evidence("TORCHELASTIC_RUN_ID is 'x'")
    assert TorchElasticEnvironment().local_processes() == 2
    assert TorchElasticEnvironment.precedence > LocalEnvironment.precedence
    assert LocalEnvironment().processes_exist()
