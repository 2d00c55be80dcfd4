"""The environments of MPI, Kubeflow and LSF: the tables of variables that each starter sets, and contradictions."""

from __future__ import annotations

import os
import socket
from typing import ClassVar

import pytest

import stratagem as sg
from stratagem import World
from stratagem.api import Confidence
from stratagem.distributed import probe
from stratagem.errors import ConfigError, LaunchError
from stratagem_testing import EnvironmentConformance

pytest.importorskip("stratagem_environments_schedulers")
from stratagem_environments_schedulers import one_node
from stratagem_environments_schedulers.kubeflow import read_pods
from stratagem_environments_schedulers.mpi import MPIEnvironment, read_local
from stratagem_environments_schedulers.variables import port_of

_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "PET_", "KUBERNETES_", "LSB_", "JSM_", "I_MPI_")


@pytest.fixture
def within(monkeypatch):
    """Return a function that sets the variables of one process."""

    def enter(variables):
        for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return sg.Run(accelerator="cpu")

    return enter


def refused(run, message):
    with pytest.raises(ConfigError, match=message):
        run.launch(lambda run: None)


# --- MPI ---------------------------------------------------------------------------------------------------------

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = HYDRA | {"I_MPI_HYDRA_UUID": "a8", "I_MPI_INFO_NUMA_NODE_NUM": "2", "I_MPI_MPIRUN": "mpirun"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPIS = {"Open MPI": OPEN_MPI, "MPICH": HYDRA, "Intel MPI": INTEL, "MVAPICH": MVAPICH}
ADDRESS = {"MASTER_ADDR": "h1", "MASTER_PORT": "1234"}


class TestMPI(EnvironmentConformance):
    plugin = "mpi"
    variables: ClassVar = OPEN_MPI | ADDRESS
    optional = ("MASTER_ADDR",)
    world = World(
        rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="h1",
        main_port=1234,
    )  # fmt: skip

    def test_missing_and_broken_variables_are_named(self):
        """Without an address mpi4py is asked, which `tests/cluster/test_mpi.py` does with the real one."""
        self.variables, self.optional = dict(self.variables), ("MASTER_ADDR", "MASTER_PORT")
        super().test_missing_and_broken_variables_are_named()


@pytest.mark.parametrize("name", MPIS)
def test_each_mpi_tells_the_rank(within, name):
    """Measured with Open MPI 4.1.4 and MPICH 4.0.2.

    Those of Intel MPI are in its developer reference ("Other Environment Variables") and in hydra, which it derives from;
    those of MVAPICH in the user guide of MVAPICH2 2.3, section 9.
    """
    run = within(MPIS[name] | ADDRESS)
    place = run.place

    assert run.stack.environment.name == "mpi"
    assert (place.rank, place.local_rank, place.node_rank, place.world_size) == (3, 1, 1, 4)
    assert (place.num_nodes, place.main_address, place.main_port) == (2, "h1", 1234)
    assert run.stack.num_nodes == 2


def test_nodes_are_numbered_where_ranks_go_round_the_nodes(within):
    """`mpirun --map-by node`."""
    place = within(OPEN_MPI | ADDRESS | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}).place

    assert (place.rank, place.local_rank, place.node_rank) == (2, 1, 0)


def test_uneven_nodes_need_their_numbers_told(within):
    uneven = OPEN_MPI | ADDRESS | {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_MCA_orte_num_nodes": "2",
    }  # fmt: skip
    refused(within(uneven), "from which the number of this node does not follow; expected .* NODE_RANK on each")
    place = within(uneven | {"NODE_RANK": "0"}).place
    assert (place.node_rank, place.num_nodes, place.local_world_size) == (0, 2, 3)


@pytest.mark.parametrize("name", MPIS)
@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_half_of_what_mpi_sets_is_refused(within, name, left):
    complete = {name: value for name, value in MPIS[name].items() if not name.startswith("I_MPI") and name != "PMI_FD"}
    missing = list(complete)[left]
    del complete[missing]
    run = None
    with pytest.raises(ConfigError, match=f"and these are not set: {missing}"):
        run = within(complete)
        run.launch(lambda run: None)
    assert MPIEnvironment().detect().confidence is Confidence.PARTIAL


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4 and OMPI_COMM_WORLD_SIZE is 4"),
        (HYDRA | {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID is 2 and MPI_LOCALNRANKS is 2; expected 0 to 1"),
        (HYDRA | {"MPI_LOCALNRANKS": "8"}, "MPI_LOCALNRANKS is 8 and PMI_SIZE is 4; expected at most 4"),
        (OPEN_MPI | HYDRA | {"PMI_RANK": "2"}, "OMPI_COMM_WORLD_RANK is '3' .*, and PMI_RANK is '2' .* or equal ones"),
    ],
)
def test_contradictions_of_mpi_are_refused(variables, message):
    with pytest.raises(ConfigError, match=message):
        read_local(variables)


def test_a_run_that_asks_for_other_processes_than_mpirun_started_is_refused(within):
    within(OPEN_MPI | ADDRESS)
    refused(sg.Run(accelerator="cpu", devices=4), "devices is 4, .* and OMPI_COMM_WORLD_LOCAL_SIZE is 2; expected one")
    refused(sg.Run(accelerator="cpu", num_nodes=3), "num_nodes is 3 and mpirun started processes on 2 nodes")


def test_a_single_rank_starts_its_processes_itself(within):
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}

    assert within(alone).launch(lambda run: (run.world_size, run.stack.environment.name)) == (1, "mpi")
    run = sg.Run(accelerator="cpu", devices=2, strategy="ddp_fork")
    assert run.launch(lambda run: (run.world_size, run.stack.environment.name)) == (2, "mpi")


# --- Kubeflow ----------------------------------------------------------------------------------------------------

V1_ADDRESS = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PET_ADDRESS = {"PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}
#: The second pod of each kind of job: variables, its rank, the number of pods, and processes in each.
JOBS = {
    "PyTorchJob": (
        {**V1_ADDRESS, **PET_ADDRESS, "RANK": "1", "WORLD_SIZE": "3", "PET_NODE_RANK": "1", "PET_NNODES": "3"}, 1, 3, None,
    ),
    "PyTorchJob, nprocPerNode 2": (
        {**V1_ADDRESS, **PET_ADDRESS, "RANK": "1", "WORLD_SIZE": "4", "PET_NODE_RANK": "1", "PET_NNODES": "2",
         "PET_NPROC_PER_NODE": "2"}, 1, 2, 2,
    ),
    "PyTorchJob, nprocPerNode auto": (
        {**V1_ADDRESS, **PET_ADDRESS, "RANK": "1", "WORLD_SIZE": "2", "PET_NODE_RANK": "1", "PET_NNODES": "2",
         "PET_NPROC_PER_NODE": "auto"}, 1, 2, None,
    ),
    "old operator": ({**V1_ADDRESS, "RANK": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1, 2, None),
    "old operator, nprocPerNode 2": (
        {**V1_ADDRESS, "RANK": "1", "WORLD_SIZE": "2", "PET_NODE_RANK": "1", "PET_NNODES": "2",
         "PET_NPROC_PER_NODE": "2"}, 1, 2, 2,
    ),
    "TrainJob": (
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1",
         "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}, 1, 2, None,
    ),
    "TrainJob, 2 processes": (
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1",
         "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}, 1, 2, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_pods_are_nodes(within, job):
    """Sources: kubeflow/training-operator 1.9.0, pkg/controller.v1/pytorch (envvar.go, master.go, elastic.go), and

    kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go, of August 2026. WORLD_SIZE was the number of replicas
    until training-operator 1.8.
    """
    variables, node_rank, num_nodes, local_size = JOBS[job]
    pods = read_pods(variables)
    assert (pods.node_rank, pods.num_nodes, pods.local_size) == (node_rank, num_nodes, local_size)

    run = within(variables)
    place, local = run.place, local_size or 1
    assert run.stack.environment.name == "kubeflow"
    assert (place.node_rank, place.num_nodes, place.local_world_size) == (node_rank, num_nodes, local)
    assert (place.rank, place.world_size) == (node_rank * local, num_nodes * local)
    assert place.main_address.startswith("job-")
    assert not run.stack.environment.plugin.processes_exist()  # a launcher starts those of the pod


class TestKubeflow(EnvironmentConformance):
    plugin = "kubeflow"
    variables: ClassVar = JOBS["TrainJob, 2 processes"][0]
    optional = ("PET_NPROC_PER_NODE",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"PET_NNODES": "1:3"},
            "PET_NNODES is '1:3', so the number of pods may change; .* start the script with torchrun",
        ),
        (
            {"WORLD_SIZE": "5"},
            "WORLD_SIZE is '5' and PET_NNODES is '2' .* expected WORLD_SIZE to be the number of pods",
        ),
        ({"PET_NODE_RANK": "2", "RANK": "2"}, "PET_NODE_RANK is 2 and PET_NNODES is 2; expected 0 to 1"),
        ({"RANK": "0"}, "PET_NODE_RANK is '1' and RANK is '0'; expected the same number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'; expected a whole number"),
    ],
)
def test_contradictions_of_a_job_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_pods(JOBS["PyTorchJob, nprocPerNode 2"][0] | changes)


def test_half_of_what_a_job_sets_is_refused(within):
    half = {name: value for name, value in JOBS["TrainJob"][0].items() if "MASTER" not in name}
    with pytest.raises(ConfigError, match="and MASTER_ADDR or PET_MASTER_ADDR, MASTER_PORT or PET_MASTER_PORT not set"):
        within(half)


def test_a_run_that_contradicts_its_job_is_refused(within):
    within(JOBS["PyTorchJob, nprocPerNode 2"][0])
    refused(sg.Run(accelerator="cpu", devices=3), "devices is 3, .* and the job has 2 processes for each pod")
    refused(sg.Run(accelerator="cpu", num_nodes=4), "num_nodes is 4 and PET_NNODES is '2' and WORLD_SIZE is '4'")


def test_torchrun_in_a_pod_wins(within):
    elastic = {
        "TORCHELASTIC_RUN_ID": "job", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    run = within(JOBS["PyTorchJob, nprocPerNode 2"][0] | elastic)

    assert run.stack.environment.name == "torchelastic"
    assert run.place.rank == 3


# --- LSF ---------------------------------------------------------------------------------------------------------

HERE = socket.gethostname()
#: A process of `jsrun -n 2 -a 2` on two hosts; the first of LSF's hosts is the launch node.
JSRUN = {
    "LSB_JOBID": "123", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "batch1 1 host1 42 host2 42",
    "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}  # fmt: skip


class TestLSF(EnvironmentConformance):
    plugin = "lsf"
    variables: ClassVar = JSRUN
    optional = ("LSB_JOBID", "LSB_JOBINDEX", "JSM_NAMESPACE_LOCAL_SIZE")
    world = World(
        rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="host1",
        main_port=port_of("123", 0),
    )  # fmt: skip


def test_the_rank_file_lists_hosts_by_process(within, tmp_path):
    """Sources: IBM Spectrum LSF 10.1, "Environment variable reference" (LSB_DJOB_RANKFILE, LSB_MCPU_HOSTS), and the LSF

    plugin of Lightning 2.6, which skips the launch node.
    """
    ranks = tmp_path / "ranks"
    ranks.write_text("batch1\nhost7\nhost7\nhost8\nhost8\n")
    place = within(JSRUN | {"LSB_DJOB_RANKFILE": str(ranks)}).place

    assert place.main_address == "host7"
    assert within(JSRUN | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7"}).place.main_address == "10.1.1.1"
    assert within(JSRUN | {"LSB_JOBINDEX": "2"}).place.main_port != port_of("123", 0)


def test_a_node_is_found_by_its_name(within):
    hosts = f"batch1 1 host1 42 {HERE}.cluster 42"
    without = {name: value for name, value in JSRUN.items() if name != "JSM_NAMESPACE_LOCAL_SIZE"}
    place = within(
        without | {"LSB_MCPU_HOSTS": hosts, "JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"}
    ).place

    assert (place.node_rank, place.local_world_size) == (1, 2)


def test_blaunch_is_refused_on_other_hosts_than_the_first(within):
    """It sets no rank."""
    blaunch = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": f"host1 2 {HERE} 2"}
    refused(within(blaunch), f"JSM_NAMESPACE_RANK is not set, and this host is '{HERE}', as if blaunch had started")
    run = within({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": f"{HERE} 2 host2 2"})

    assert run.stack.environment.name == "lsf"
    assert run.launch(lambda run: run.world_size) == 1
    refused(
        sg.Run(accelerator="cpu", num_nodes=2), "num_nodes is 2, and JSM_NAMESPACE_RANK is not set, as in the script"
    )


def test_mpirun_under_lsf_is_mpi(within):
    assert within(OPEN_MPI | ADDRESS | {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 2 b 2"}).stack.environment.name == "mpi"


# --- Chosen by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slurm", "mpi", "lsf", "kubeflow"])
def test_an_environment_that_is_not_there_is_refused(within, name):
    within({})

    refused(sg.Run(accelerator="cpu", environment=name), "set; expected")


@pytest.mark.parametrize("name", ["mpi", "lsf"])
def test_tasks_do_not_train_alone_in_an_environment_that_is_not_there(within, name):
    step = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2", "STEP_NODELIST": "n1"}
    ranks = {"JOB_ID": "7", "PROCID": "1", "LOCALID": "1", "NODEID": "0"}
    within({f"SLURM_{key}": value for key, value in (step | ranks).items()})

    refused(sg.Run(accelerator="cpu", environment=name), f"environment is '{name}', and none of its variables is set")


def test_a_rank_that_waits_for_the_port_of_rank_0_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probe, "FIRST_NOTICE_S", 0.1)

    with pytest.raises(LaunchError, match="rank 1 waited 0.3 s for rank 0, which writes its port to"):
        one_node._read(tmp_path, rank=1, limit_s=0.3)
    assert f"stratagem: rank 1 waits for rank 0, which writes its port to {tmp_path}" in capsys.readouterr().err
