"""`stratagem run` with the real launchers: the Trainer finds the processes, devices and nodes that the command started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ports import free_port
from programs import scripts

#: Every rank trains, and writes what it is.
TRAIN = """
import json, os, sys
from pathlib import Path
import torch
import stratagem as sg
from stratagem_testing.reference import Net, data, joined_batches

def main():
    options = json.loads(os.environ.get("TRAINER", "{}"))
    trainer = sg.Trainer(strategy="ddp", accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
                         enable_checkpointing=False, **options)
    model = Net()
    trainer.fit(model, joined_batches(2, 8))
    world = trainer.run.world
    Path(f"rank-{world.rank}.json").write_text(json.dumps({
        "world": [world.world_size, world.local_world_size, world.num_nodes], "node": world.node_rank,
        "weight": float(model.net[0].weight.sum()), "arguments": sys.argv[1:], "value": os.environ.get("VALUE"),
        "cores": len(os.sched_getaffinity(0)),
    }))

main()
"""

ARGUMENTS = ["two words", "it's", "$HOME", "--nodes", "*"]


@pytest.fixture(autouse=True)
def script():
    Path("train.py").write_text(TRAIN)


def stratagem(*words, **variables):
    with_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} | variables
    return scripts.run(
        [sys.executable, "-m", "stratagem", "run", *words], env={**os.environ, **with_root}, capture_output=True, text=True,
        timeout=450, check=False,
    )  # fmt: skip


def ranks():
    """Return what every rank wrote; they have trained one model."""
    found = {int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in Path.cwd().glob("rank-*.json")}
    assert len({each["weight"] for each in found.values()}) == 1, found
    return [found[rank] for rank in sorted(found)]


# --- torchrun, and plain Python ----------------------------------------------------------------------------------


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_the_pods_of_a_manifest_train_together")
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_two_processes_train_with_devices_left_out(launcher):
    done = stratagem("train.py", "--launcher", launcher, "--devices", "2", "--env", "VALUE=a b", "--", *ARGUMENTS)

    assert done.returncode == 0, done.stderr
    assert [(each["world"], each["arguments"], each["value"]) for each in ranks()] == [
        ([2, 2, 1], ARGUMENTS, "a b")
    ] * 2


def test_a_script_that_contradicts_the_command_is_refused():
    done = stratagem("train.py", "--launcher", "local", "--devices", "2", TRAINER='{"devices": 3}')

    assert done.returncode != 0
    assert "WORLD_SIZE is 2 and devices x num_nodes is 3 x 1; expected the same number" in done.stderr
    assert not list(Path.cwd().glob("rank-*"))


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_the_pods_of_a_manifest_train_together")
def test_two_agents_of_torchrun_make_two_nodes():
    """The same line on both nodes, which share this machine here."""
    port = free_port()
    words = (
        "--nodes",
        "2",
        "--devices",
        "1",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--option=--local-addr=127.0.0.1",
    )
    command = [sys.executable, "-m", "stratagem", "run", "train.py", *words]
    agents = [scripts.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) for _ in range(2)]
    try:
        said = [agent.communicate(timeout=450)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill_all()

    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [each["world"] for each in ranks()] == [[2, 1, 2]] * 2


def test_ctrl_c_ends_torchrun_and_its_workers(tmp_path):
    Path("train.py").write_text(
        "import os, time\nfrom pathlib import Path\nPath(f'pid-{os.getpid()}').touch()\ntime.sleep(300)"
    )
    command = [sys.executable, "-m", "stratagem", "run", "train.py", "--launcher", "torchrun", "--devices", "2"]
    process = scripts.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=180) != 0
    finally:
        process.kill_all()
    for path in tmp_path.glob("pid-*"):
        assert not Path(f"/proc/{path.name[4:]}").exists()


# --- A PyTorchJob ------------------------------------------------------------------------------------------------


def test_the_pods_of_a_manifest_train_together(tmp_path):
    """Runs the container's command twice, with the variables that the training operator (1.9) sets in its pods."""
    printed = stratagem(
        "train.py", "--nodes", "2", "--submit", "kubernetes", "--image", "x", "--python", sys.executable, "--dry", "--",
        *ARGUMENTS,
    )  # fmt: skip
    spec = yaml.safe_load(printed.stdout)["spec"]
    roles = spec["pytorchReplicaSpecs"]
    nodes, per_node = sum(role["replicas"] for role in roles.values()), int(spec["nprocPerNode"])
    port = free_port()
    pods = []
    for rank, role in enumerate(["Master", "Worker"]):
        (container,) = roles[role]["template"]["spec"]["containers"]
        variables = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
            "WORLD_SIZE": nodes * per_node, "RANK": rank, "PET_NODE_RANK": rank, "PET_NNODES": nodes,
            "PET_NPROC_PER_NODE": per_node, "PYTHONUNBUFFERED": 1,
        }  # fmt: skip
        command = [word.replace("$$", "$") for word in container["command"]]
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        pods.append(scripts.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True))
    try:
        said = [pod.communicate(timeout=450)[1] for pod in pods]
    finally:
        for pod in pods:
            pod.kill_all()

    assert [pod.returncode for pod in pods] == [0, 0], said
    assert [(each["world"], each["arguments"]) for each in ranks()] == [([2, 1, 2], ARGUMENTS)] * 2


# --- SLURM -------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(slurm):
    """Return a function that runs a command as a client of the cluster."""

    def run(*words, **variables):
        return subprocess.run(
            words, env=slurm.variables(**variables), capture_output=True, text=True, timeout=450, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run


STRATAGEM = (sys.executable, "-m", "stratagem", "run", "train.py")


@pytest.mark.xdist_group("slurm")
def test_a_submitted_job_trains_on_two_nodes(slurm, client):
    done = client(
        *STRATAGEM, "--nodes", "2", "--devices", "1", "--submit", "slurm", "--time", "10m", "--memory", "500M",
        "--env", "VALUE=a b", "--", *ARGUMENTS,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[-1]
    slurm.await_state(number, "COMPLETED", "FAILED", timeout=450)
    job = slurm.job(number)
    assert job["JobState"] == "COMPLETED", Path(f"train-{number}.out").read_text()
    assert (job["JobName"], job["TimeLimit"], job["Requeue"]) == ("train", "00:10:00", "1")
    assert Path(f"train-{number}.out").exists()
    assert [(each["world"], each["arguments"], each["value"]) for each in ranks()] == [
        ([2, 1, 2], ARGUMENTS, "a b")
    ] * 2


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_a_submitted_job_trains_on_two_nodes")
@pytest.mark.xdist_group("slurm")
def test_srun_is_chosen_in_an_allocation_and_in_a_step_of_one(slurm, client):
    """In the script of a batch job, and in the only task of a step, such as the shell of `srun --pty bash`."""
    line = shlex.join(STRATAGEM)
    Path("job.sh").write_text(
        f"#!/bin/bash\n{line} && mv rank-1.json first && srun -N1 -n1 {line} --nodes 2 --devices 1\n"
    )
    number = slurm.sbatch(Path("job.sh"), "-N2", "--ntasks-per-node=1", "--output=job.out", cwd=Path.cwd())
    slurm.await_state(number, "COMPLETED", "FAILED", timeout=450)

    said = Path("job.out").read_text()
    assert slurm.job(number)["JobState"] == "COMPLETED", said
    assert said.count(f"stratagem run: srun (SLURM_JOB_ID is {number}: this is an allocation of SLURM)") == 2
    assert "srun --overlap --kill-on-bad-exit=1" in said
    assert [each["world"] for each in ranks()] == [[2, 1, 2]] * 2


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_a_script_that_contradicts_the_command_is_refused")
@pytest.mark.xdist_group("slurm")
def test_a_script_that_contradicts_srun_is_refused(slurm, client):
    options = ("--launcher", "srun", "--nodes", "1", "--devices", "2", "--partition", "main", "--time", "5m")
    done = client(*STRATAGEM, *options, TRAINER='{"devices": 3}')

    assert done.returncode != 0
    assert "devices is 3, which makes 3 processes on this node, and SLURM_STEP_TASKS_PER_NODE is '2'" in done.stderr, (
        done.stderr
    )
    assert not list(Path.cwd().glob("rank-*"))


# --- MPI ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(guard="tests/cluster/test_mpi.py::test_ranks_of_mpi_train_as_one_process")
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpirun(need, program):
    need(program, package="openmpi-bin mpich")
    oversubscribe = ["--oversubscribe"] if program == "mpirun.openmpi" else []
    options = ("--launcher", "mpirun", "--mpirun", program, "--devices", "2", "--env", "VALUE=a b")
    done = stratagem("train.py", *options, *oversubscribe, "--", *ARGUMENTS)

    assert done.returncode == 0, done.stderr
    found = ranks()
    assert [(each["world"], each["arguments"], each["value"]) for each in found] == [([2, 2, 1], ARGUMENTS, "a b")] * 2
    assert {each["cores"] for each in found} == {len(os.sched_getaffinity(0))}  # bound to none
