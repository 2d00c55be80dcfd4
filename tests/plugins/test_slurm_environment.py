"""The environment of SLURM: ranks, addresses and ports from what srun sets, and what is not a task."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import pytest

import stratagem as sg
from stratagem import World
from stratagem.api import Confidence
from stratagem.errors import ConfigError
from stratagem_testing import EnvironmentConformance

slurm = pytest.importorskip("stratagem_environments_schedulers.slurm")
from stratagem_environments_schedulers.hostlist import expand, expand_counts  # noqa: E402
from stratagem_environments_schedulers.variables import port_of  # noqa: E402

#: What a task of `srun --nodes=2 --ntasks-per-node=2` finds (SLURM 22.05).
TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NNODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NODELIST": "node[01-04]", "SLURM_JOB_NAME": "bash", "SLURM_GTIDS": "2,3",
}  # fmt: skip
#: The second node of `srun -n 4 -N 2`, which SLURM may fill unevenly.
UNEVEN = TASK | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}


class TestSlurm(EnvironmentConformance):
    plugin = "slurm"
    variables: ClassVar = {
        name: TASK[name]
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
                     "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    }  # fmt: skip
    optional = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    world = World(
        rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="node01",
        main_port=port_of("7", 0),
    )  # fmt: skip


@pytest.fixture
def within(monkeypatch):
    """Return a function that sets the variables of one task."""

    def enter(variables):
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return enter


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3,7-8]-ib", ["n1-ib", "n3-ib", "n7-ib", "n8-ib"]),
        ("r[1-2]n[1-2],login", ["r1n1", "r1n2", "r2n1", "r2n2", "login"]),
        ("b-2,a-[1-2].x.org", ["b-2", "a-1.x.org", "a-2.x.org"]),
        ("n[9-10]", ["n9", "n10"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a b", ["a", "b"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert expand(text, "X") == hosts


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n1-3]", "n[3-1]", "n[a-b]", "n[[1]]", "n[]", "n[1-99999999]"])
def test_broken_lists_of_hosts_are_refused(text):
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST is"):
        expand(text, "SLURM_STEP_NODELIST")


@pytest.mark.parametrize("text", ["n[1-3]", "n[08-11],m", "r[1-2]n[1-2]", "n[1,3,7-8]", "b2,a1", "n[098-101]"])
def test_lists_of_hosts_mean_what_scontrol_says(text, tmp_path, need):
    need("scontrol", package="slurm-client")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"SLURM_CONF": conf})

    assert expand(text, "X") == done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3)", [2, 2, 2]), ("3,1", [3, 1]), ("4(x2),1,2(x2)", [4, 4, 1, 2, 2])]
)
def test_tasks_of_each_node(text, counts):
    assert expand_counts(text, "X") == counts


@pytest.mark.parametrize("text", ["", "2,", "0", "2(x0)", "2x2", "-1", "2(x9999999)"])
def test_broken_task_counts_are_refused(text):
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE is"):
        expand_counts(text, "SLURM_STEP_TASKS_PER_NODE")


def test_nodes_may_have_different_numbers_of_tasks(within):
    within(UNEVEN)
    run = sg.Run(accelerator="cpu")

    place = run.place
    assert run.stack.environment.name == "slurm"
    assert (place.rank, place.local_rank, place.local_world_size, place.num_nodes) == (3, 0, 1, 2)
    assert run.num_processes == 1
    assert run.stack.num_nodes == 2
    within(UNEVEN | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert sg.Run(accelerator="cpu").num_processes == 3


def test_exported_addresses_replace_those_of_the_step(within):
    within(TASK | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4321"})
    place = sg.Run(accelerator="cpu").place

    assert (place.main_address, place.main_port) == ("10.0.0.9", 4321)
    within(TASK | {"MASTER_PORT": "99999"})
    with pytest.raises(ConfigError, match="MASTER_PORT is '99999'; expected a port"):
        sg.Run(accelerator="cpu").launch(lambda run: None)


def test_steps_and_jobs_beside_each_other_have_other_ports():
    ports = [port_of(str(job), step) for job in range(1000, 1100) for step in range(20)]

    assert len(set(ports)) == len(ports)
    assert all(15000 <= port < 30000 for port in [*ports, port_of("17_3", 1), port_of("", 4294967290)])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"devices": 3}, "devices is 3, which makes 3 processes on this node, and SLURM_STEP_TASKS_PER_NODE is "
         r"'2\(x2\)' and SLURM_NODEID is '1', 2 on this node; expected one process for each device; leave devices at "
         '"auto", or start srun with --ntasks-per-node=3'),
        ({}, {"num_nodes": 3}, "num_nodes is 3 and SLURM_STEP_NUM_NODES is 2; expected the same number; leave"),
        ({"SLURM_PROCID": "4"}, {}, "SLURM_PROCID is 4 and SLURM_STEP_NUM_TASKS is 4; expected 0 to 3"),
        ({"SLURM_LOCALID": "2"}, {}, "SLURM_LOCALID is 2 and the number of tasks on this node is 2"),
        ({"SLURM_NODEID": "2"}, {}, "SLURM_NODEID is 2 and SLURM_STEP_NUM_NODES is 2; expected 0 to 1"),
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID is 'x'; expected a whole number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, {}, "SLURM_STEP_TASKS_PER_NODE is '2,1', SLURM_STEP_NUM_TASKS is '4'"),
        ({"SLURM_STEP_NUM_TASKS": "6", "SLURM_HET_SIZE": "2"}, {}, "in a heterogeneous job of 2 components; expected"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(within, changes, options, message):
    within(TASK | changes)
    with pytest.raises(ConfigError, match=message):
        sg.Run(accelerator="cpu", **options).launch(lambda run: None)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_half_of_the_variables_is_refused(within, missing):
    within({name: value for name, value in TASK.items() if name != missing})
    evidence = slurm.SlurmEnvironment().detect()

    assert evidence.confidence is Confidence.PARTIAL
    assert f"{missing} not set" in evidence.reason
    with pytest.raises(ConfigError, match=f"{missing} is not set"):
        sg.Run(accelerator="cpu").launch(lambda run: None)


BATCH = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
         "SLURM_NNODES": "2", "SLURM_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}  # fmt: skip
SALLOC = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive", "SLURM_NNODES": "2"}


@pytest.mark.parametrize("variables", [BATCH, SALLOC], ids=["sbatch", "salloc"])
def test_a_script_of_sbatch_and_a_shell_are_one_process(within, variables):
    within(variables)
    run = sg.Run(accelerator="cpu")

    assert run.stack.environment.name == "slurm"
    assert "in job" in run.stack.environment.reason
    assert run.launch(lambda run: run.world_size) == 1
    with pytest.raises(
        ConfigError, match="num_nodes is 2, and srun did not start this program on several nodes: SLURM_J"
    ):
        sg.Run(accelerator="cpu", num_nodes=2).launch(lambda run: None)


def test_the_only_task_of_a_step_starts_the_others(within):
    within(TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    run = sg.Run(accelerator="cpu", devices=2, strategy="ddp_fork")

    assert run.launch(lambda run: (run.world_size, run.stack.environment.name)) == (2, "slurm")


def test_another_number_of_processes_than_is_expected_is_refused(within):
    within(TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4 and devices is 2; expected the same number"):
        sg.Run(accelerator="cpu", devices=2, strategy="ddp_fork").launch(lambda run: None)


#: Prints what the environment sees in a process whose parent is the task.
ASK = """
import os
os.environ["SLURM_TASK_PID"] = str(os.getppid())
from stratagem_environments_schedulers.slurm import SlurmEnvironment
print(SlurmEnvironment().processes_exist(), SlurmEnvironment().detect().confidence)
"""


def test_a_shell_of_srun_is_not_a_set_of_tasks(tmp_path):
    """`srun -n 4 --pty bash` leaves its variables to what a person starts in that shell."""
    environment = os.environ | TASK | {"SLURM_PTY_PORT": "1"}
    script = f"{sys.executable} -c '{ASK}'\nexit\n"
    typed = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, timeout=180)
    inner = subprocess.run(
        ["bash", "-c", f"{script}true"], env=environment, capture_output=True, text=True, timeout=180
    )

    assert typed.stdout.strip() == "False in job", typed.stderr
    assert inner.stdout.strip() == "True certain", inner.stderr  # srun bash run.sh, in a shell of srun --pty


def test_a_task_with_one_visible_device_uses_the_first():
    """As with --gpus-per-task=1 or --gpu-bind=single:1, whatever the local rank is."""
    from stratagem.api import Accelerator
    from stratagem.config.devices import devices_of_processes

    class OneVisible(Accelerator):
        def count(self):
            return 1

    for wanted in ("auto", 4, -1):
        assert devices_of_processes(wanted, OneVisible(), 4, "environment 'slurm'")[3] == 0


# --- Requeue -----------------------------------------------------------------------------------------------------


BATCH = TASK | {"ENVIRONMENT": "BATCH", "SLURM_CLUSTER_NAME": "cluster"}
#: Task 3 of a job array; the number of one of its tasks is also that of the array.
ARRAY = BATCH | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("variables", "command", "job"),
    [(TASK, None, "slurm 7"), (BATCH, ["scontrol", "requeue", "7"], "slurm cluster 7"),
     (ARRAY, ["scontrol", "requeue", "7_3"], "slurm cluster 7_3"), ({}, None, None)],
    ids=["srun alone", "sbatch", "array", "no job"],
)  # fmt: skip
def test_only_a_job_with_a_script_can_be_requeued(within, variables, command, job):
    within(variables)
    environment = slurm.SlurmEnvironment()

    assert environment.requeue_command() == command
    assert environment.job() == job
    callbacks = [{"name": "preemption", "signals": ["SIGUSR1"]}] if command else []
    assert environment.default_callbacks() == callbacks
    assert slurm.SlurmEnvironment(auto_requeue=False).default_callbacks() == []


def test_a_signal_that_cannot_be_asked_for_is_refused(within):
    within(BATCH)
    (callback,) = slurm.SlurmEnvironment(requeue_signal="SIGUSR2").default_callbacks()
    assert callback["signals"] == ["SIGUSR2"]

    for name in ("SIGTERM", "SIGKILL", "USR1"):
        with pytest.raises(ConfigError, match=f"environment.requeue_signal is '{name}'; expected one of SIGUSR1, "):
            slurm.SlurmEnvironment(requeue_signal=name)
    with pytest.raises(ConfigError, match="is 'SIGUSR2' and environment.auto_requeue is False"):
        slurm.SlurmEnvironment(auto_requeue=False, requeue_signal="SIGUSR2")
