"""Training under a real SLURM of two nodes: srun, requeue, arrays, failing nodes, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch

from programs import scripts
from stratagem_testing.reference import joined_batches, relative_difference, train_plainly
from stratagem_trainer.checkpoint_files import read_any

pytestmark = pytest.mark.xdist_group("slurm")

PROGRAM = Path(__file__).with_name("slurm_program.py")
#: The script at the top of docs/slurm.md.
DOCUMENTED = re.search(r"```bash\n(.*?)```", (PROGRAM.parents[2] / "docs/slurm.md").read_text(), re.DOTALL).group(1)
QUIET = {"OMP_NUM_THREADS": "1"}
#: Pauses long enough after a step for a signal to come before the last one, on a machine that is busy.
LONG = {"max_steps": 60, "pause_s": 0.3, "checkpoints_every": 4}


def command(options):
    return [sys.executable, str(PROGRAM), json.dumps(options)]


def places(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("place-*.json"))]


def steps(folder, rank=0):
    """Return the steps that `rank` has made, each with the number of restarts before it."""
    path = folder / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines if len(line.split()) == 2]


def await_steps(slurm, folder, number, job, restarts=0, timeout=360):
    deadline = time.monotonic() + timeout
    while len([step for step in steps(folder) if step[0] == restarts]) < number:
        output = "".join(path.read_text() for path in folder.glob("*.out"))
        assert time.monotonic() < deadline, f"{output}\n{slurm.job(job)}\n{slurm.state()}"
        time.sleep(0.05)


def submit(slurm, folder, options, *sbatch):
    """Submit the script of docs/slurm.md with `options`, on nodes without GPUs; return the job's number."""
    text = DOCUMENTED.replace("#SBATCH --gpus-per-task=1\n", "").replace(
        "python train.py", shlex.join(command(options))
    )
    assert text.count("#SBATCH") == 6
    script = folder / "job.sh"
    script.write_text(text)
    return slurm.sbatch(script, f"--output={folder}/job.out", *sbatch, cwd=folder, **QUIET)


def finish(slurm, folder, job, name="job", timeout=540):
    slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout=timeout)
    output = (folder / f"{name}.out").read_text()
    assert slurm.job(job)["JobState"] == "COMPLETED", f"{output}\n{slurm.state()}"
    return output


def end(folder, rank=0):
    return torch.load(folder / f"end-{rank}.pt")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that trains with `options` on this machine, without SLURM, in as many processes."""
    ends = {}

    def train(devices, options):
        if devices not in ends:
            folder = tmp_path_factory.mktemp("uninterrupted")
            options = options | {"pause_s": 0, "devices": devices}
            done = scripts.run(command(options), cwd=folder, capture_output=True, text=True, timeout=540)
            assert done.returncode == 0, done.stdout + done.stderr
            ends[devices] = end(folder)
        return ends[devices]

    return train


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()


# --- srun --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_a_submitted_job_trains_on_two_nodes")
def test_two_nodes_with_two_tasks_each_train_what_one_process_trains(slurm, tmp_path):
    options = {"max_epochs": 1, "pause_s": None}

    done = slurm.srun("-N2", "--ntasks-per-node=2", *command(options), cwd=tmp_path, **QUIET)

    assert done.returncode == 0, done.stdout
    reference, norms = train_plainly(joined_batches(8, 24))
    weights = end(tmp_path)
    assert weights.pop("steps") == 8
    assert max(norms) > 1
    assert relative_difference(weights, reference) < 1e-6
    assert all(torch.equal(end(tmp_path, rank)[name], weights[name]) for rank in range(4) for name in weights)
    common = {"world_size": 4, "num_nodes": 2, "local_world_size": 2, "main_address": "n1",
              "environment": "environment 'slurm'"}  # fmt: skip
    assert places(tmp_path) == [
        common | {"rank": rank, "local_rank": rank % 2, "node_rank": rank // 2} for rank in range(4)
    ]


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_nodes_with_different_numbers_of_tasks_train_what_one_process_trains(slurm, tmp_path):
    """``srun -n 4 -N 2`` fills the nodes with 3 and 1 tasks."""
    options = {"max_epochs": 1, "pause_s": None}

    done = slurm.srun("-N2", "-n4", *command(options), cwd=tmp_path, **QUIET)

    assert done.returncode == 0, done.stdout
    reference, _ = train_plainly(joined_batches(8, 24))
    weights = end(tmp_path)
    weights.pop("steps")
    assert relative_difference(weights, reference) < 1e-6
    assert [(each["node_rank"], each["local_rank"], each["local_world_size"]) for each in places(tmp_path)] == [
        (0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1),
    ]  # fmt: skip


def one_sentence_on_each(output, tasks):
    """Return the last line of each task's output, without the names of modules and types."""
    lines = {rank: [] for rank in range(tasks)}
    for line in output.splitlines():
        label, colon, text = line.partition(": ")
        if colon and label.strip().isdecimal():
            lines[int(label)].append(text)
    return [texts[-1].partition("Error: ")[2] for texts in lines.values()]


def test_tasks_per_node_that_differ_from_devices_are_refused_on_all_tasks(slurm, tmp_path):
    options = {"max_epochs": 1, "devices": 3}

    done = slurm.srun("--label", "-N1", "--ntasks-per-node=2", *command(options), cwd=tmp_path, **QUIET)

    assert done.returncode != 0
    first, second = one_sentence_on_each(done.stdout, 2)
    assert first == second
    assert "devices is 3" in first
    assert "SLURM_STEP_TASKS_PER_NODE is '2'" in first
    assert "--ntasks-per-node=3" in first
    assert not list(tmp_path.glob("steps-*"))


@pytest.mark.sweep(
    guard="tests/cluster/test_slurm.py::test_tasks_per_node_that_differ_from_devices_are_refused_on_all_tasks"
)
def test_without_the_schedulers_package_two_tasks_are_refused(slurm, tmp_path):
    hidden = {"STRATAGEM_DISABLE_PLUGINS": "slurm"}

    done = slurm.srun("--label", "-n2", *command({"max_epochs": 1}), cwd=tmp_path, **QUIET, **hidden)

    assert done.returncode != 0
    for sentence in one_sentence_on_each(done.stdout, 2):
        assert "SLURM_STEP_ID is '0'" in sentence
        assert "as if SLURM's srun had started this program several times" in sentence
    assert not list(tmp_path.glob("steps-*"))


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_a_plain_start_in_a_shell_of_salloc_trains_in_one_process(slurm, tmp_path):
    """salloc sets SLURM_NTASKS in the shell, where no task was started."""
    ask = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('SLURM')}))"
    variables = json.loads(slurm.ask("salloc", "-N2", "-n4", "-Q", sys.executable, "-c", ask))
    assert variables["SLURM_NTASKS"] == "4"

    done = scripts.run(
        command({"max_epochs": 1}), cwd=tmp_path, env=slurm.variables(**variables), capture_output=True, text=True,
        timeout=360,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    (place,) = places(tmp_path)
    assert (place["world_size"], place["num_nodes"]) == (1, 1)


# --- Requeue -----------------------------------------------------------------------------------------------------


def test_a_job_is_requeued_and_resumes_exactly(slurm, tmp_path, uninterrupted):
    job = submit(slurm, tmp_path, LONG, "-N2", "--ntasks-per-node=1")
    await_steps(slurm, tmp_path, 5, job)
    slurm.signal(job, "SIGUSR1")
    slurm.restart_now(job)
    output = finish(slurm, tmp_path, job)

    assert slurm.job(job)["Restarts"] == "1"
    [last] = [step for restarts, step in steps(tmp_path) if restarts == 0][-1:]
    assert f"`scontrol requeue {job}`: the job starts again; leaving with code 75" in output
    assert re.search(rf"SIGUSR1 to rank [01]: saved checkpoints/preempted.ckpt after step {last};", output)
    assert "(restart 1): training continues from checkpoints/preempted.ckpt" in output
    assert "Traceback" not in output
    assert [step for restarts, step in steps(tmp_path) if restarts == 1] == list(range(last + 1, 61))
    assert_equal(end(tmp_path), uninterrupted(2, LONG))


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
@pytest.mark.parametrize("ckpt_path", [None, "last", "hpc"])
def test_tasks_of_an_array_are_requeued_on_their_own(slurm, tmp_path, uninterrupted, ckpt_path):
    """Task 0 finishes undisturbed. Each has its own folder."""
    options = LONG | {"max_steps": 30, "ckpt_path": ckpt_path}
    script = tmp_path / "array.sh"
    words = shlex.join(command(options))
    shared = 'mkdir -p "$SLURM_ARRAY_TASK_ID"; cd "$SLURM_ARRAY_TASK_ID"'
    script.write_text(f"#!/bin/bash\n{shared}\nsrun {words}\n")
    array = slurm.sbatch(script, "--array=0-1", "-n1", "--open-mode=append", f"--output={tmp_path}/%a.out",
                         cwd=tmp_path, **QUIET)  # fmt: skip
    job = f"{array}_1"
    await_steps(slurm, tmp_path / "1", 5, job)
    slurm.signal(job, "SIGUSR1")
    slurm.restart_now(job)
    output = finish(slurm, tmp_path, job, name="1")
    finish(slurm, tmp_path, f"{array}_0", name="0")

    assert (slurm.job(job)["Restarts"], slurm.job(f"{array}_0")["Restarts"]) == ("1", "0")
    assert f"`scontrol requeue {job}`" in output
    for task in ("0", "1"):
        assert_equal(end(tmp_path / task), uninterrupted(1, options | {"ckpt_path": None}))


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_a_job_that_must_not_be_requeued_keeps_its_checkpoint_and_says_why_it_fails(slurm, tmp_path):
    job = submit(slurm, tmp_path, LONG, "-N1", "--ntasks-per-node=1", "--no-requeue")
    await_steps(slurm, tmp_path, 2, job)
    slurm.signal(job, "SIGUSR1")
    slurm.await_state(job, "FAILED")

    assert slurm.job(job)["ExitCode"] == "1:0"
    output = (tmp_path / "job.out").read_text()
    assert f"and `scontrol requeue {job}` failed (code 1: Requested operation is presently disabled" in output
    assert read_any(tmp_path / "checkpoints/preempted.ckpt")["job"] == f"slurm test {job}"


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_the_signal_that_sbatch_asks_for_comes_in_time(slurm, tmp_path, uninterrupted):
    options = LONG | {"pause_s": 1.0}
    job = submit(slurm, tmp_path, options, "-N2", "--ntasks-per-node=1", "--time=2", "--signal=SIGUSR1@90")
    slurm.restart_now(job, timeout=450)
    finish(slurm, tmp_path, job)

    assert slurm.job(job)["Restarts"] == "1"
    assert_equal(end(tmp_path), uninterrupted(2, LONG))


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_killed_before_the_save_it_resumes_from_the_checkpoint_before(slurm, tmp_path, uninterrupted):
    job = submit(slurm, tmp_path, LONG, "-N2", "--ntasks-per-node=1")
    await_steps(slurm, tmp_path, 6, job)
    slurm.kill_tasks("n1")
    slurm.kill_tasks("n2")
    slurm.ask("scontrol", "requeue", job)
    slurm.restart_now(job)
    output = finish(slurm, tmp_path, job)

    assert not (tmp_path / "checkpoints/preempted.ckpt").exists()
    resumed = next(step for restarts, step in steps(tmp_path) if restarts == 1)
    assert resumed % 4 == 1
    assert resumed > 1
    assert "training continues from checkpoints/" in output
    assert_equal(end(tmp_path), uninterrupted(2, LONG))


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_a_cancelled_job_is_not_started_again(slurm, tmp_path):
    job = submit(slurm, tmp_path, LONG, "-N1", "--ntasks-per-node=1")
    await_steps(slurm, tmp_path, 2, job)
    slurm.ask("scancel", job)
    slurm.await_state(job, "CANCELLED")

    assert slurm.job(job)["Restarts"] == "0"


# --- Failing nodes -----------------------------------------------------------------------------------------------


@pytest.fixture
def second_node(slurm):
    yield "n2"
    slurm.cancel_all()
    slurm.power_cycle("n2")


@pytest.mark.sweep(guard="tests/cluster/test_slurm.py::test_a_job_is_requeued_and_resumes_exactly")
def test_when_a_node_fails_the_others_name_it_and_the_job_restarts(slurm, tmp_path, uninterrupted, second_node):
    job = submit(slurm, tmp_path, LONG, "-N2", "--ntasks-per-node=1", "--requeue")
    await_steps(slurm, tmp_path, 6, job)
    slurm.power_off(second_node)
    deadline = time.monotonic() + 180
    while "is gone; expected all ranks to stay" not in (tmp_path / "job.out").read_text():  # before SLURM notices
        assert time.monotonic() < deadline, (tmp_path / "job.out").read_text()
        time.sleep(0.1)
    slurm.mark_down(second_node)
    slurm.power_on(second_node)
    # The controller ends what it believes to run on the node, by the number of the job: SLURM itself waits two minutes.
    time.sleep(5)
    slurm.restart_now(job)
    output = finish(slurm, tmp_path, job)

    assert slurm.job(job)["Restarts"] == "1"
    assert "PeerError: rank 0 lost its connection: rank 1 (" in output
    assert "training continues from checkpoints/" in output
    assert_equal(end(tmp_path), uninterrupted(2, LONG))
