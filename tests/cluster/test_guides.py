"""Multi-node recipes that guides to distributed training print: the same commands, variables and arguments of the Trainer.

What cannot run as printed, and why:

====================================================  ================================================================
printed                                               instead
====================================================  ================================================================
``--gres=gpu:8``, ``accelerator="gpu"``, 8 devices    the machine has no GPU: one or two processes on the CPU
``python -m torchelastic.distributed.launch``         part of torch by now: ``python -m torch.distributed.run``
``--rdzv_backend=etcd``, with a server of etcd        ``c10d``, which needs no server; etcd is tested in test_torchrun.py
``horovodrun -np 4``, ``-H host1:4,host2:4``          contrib/horovod; here ``mpirun -np 2``, with ``ddp``
``NODE_RANK=1 LOCAL_RANK=0`` for one machine          the two numbers are exchanged in print: refused, see below
``devices=int(os.getenv("WORLD_SIZE", 1))`` in pods   WORLD_SIZE counts all pods: refused, see below
====================================================  ================================================================
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ports import free_port
from programs import scripts

#: The script of the guides, with a module and data; each rank writes which world it was in.
TRAIN = """
import json, os
from pathlib import Path
import stratagem as L
from stratagem_testing.reference import Net, joined_batches

QUIET = dict(max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False)
model, train_loader = Net(), joined_batches(2, 8)

trainer = L.Trainer(**QUIET, {arguments})
trainer.fit(model, train_loader)
world = trainer.run.world
Path(f"rank-{{world.rank}}.json").write_text(json.dumps({{
    "world": [world.world_size, world.local_world_size, world.num_nodes], "weight": float(model.net[0].weight.sum())}}))
"""


def write_script(arguments):
    Path("train.py").write_text(TRAIN.format(arguments=arguments))


def worlds():
    """Return the world that each rank saw; all of them trained one model."""
    found = {int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in Path.cwd().glob("rank-*.json")}
    assert len({each["weight"] for each in found.values()}) == 1, found
    return [found[rank]["world"] for rank in sorted(found)]


def together(*starts, limit_s=450):
    """Run commands, each with its variables, at the same time; return exit codes and what they print on stderr."""
    with ExitStack() as stack:
        processes = []
        for command, variables in starts:
            process = scripts.Popen(
                [sys.executable, *command], env={**os.environ, **variables}, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            stack.callback(process.kill_all)
            processes.append(process)
        said = [process.communicate(timeout=limit_s)[1] for process in processes]
        return [process.wait() for process in processes], said


# --- Variables exported by hand ----------------------------------------------------------------------------------


def test_each_node_exports_its_rank_and_starts_the_script():
    """`export MASTER_ADDR=... MASTER_PORT=... WORLD_SIZE=... NODE_RANK=...; python train.py` on two nodes."""
    write_script('accelerator="cpu", devices=2, num_nodes=2, strategy="ddp"')
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    codes, said = together(*((["train.py"], shared | {"NODE_RANK": str(rank)}) for rank in range(2)))

    assert codes == [0, 0], said
    assert worlds() == [[4, 2, 2]] * 4


def test_variables_of_every_process_in_the_right_order_and_as_printed():
    """A guide prints them with NODE_RANK and LOCAL_RANK exchanged."""
    write_script('accelerator="cpu", devices=2, strategy="ddp"')
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    codes, said = together(*((["train.py"], shared | {"NODE_RANK": "0", "LOCAL_RANK": str(rank)}) for rank in range(2)))
    assert codes == [0, 0], said
    assert worlds() == [[2, 2, 1]] * 2

    (code,), (said,) = together((["train.py"], shared | {"NODE_RANK": "1", "LOCAL_RANK": "0"}))
    assert code == 1
    assert "NODE_RANK is 1 and num_nodes is 1; expected 0 to 0" in said


# --- torchrun ----------------------------------------------------------------------------------------------------


def test_elastic_launch_with_the_options_as_spelled():
    write_script('accelerator="cpu", devices=2, strategy="ddp"')
    words = (
        "-m torch.distributed.run --nnodes=1:1 --nproc_per_node=2 --rdzv_id=JOB_ID --rdzv_backend=c10d "
        f"--rdzv_endpoint=127.0.0.1:{free_port()} train.py"
    )
    codes, said = together((words.split(), {}))

    assert codes == [0], said
    assert worlds() == [[2, 2, 1]] * 2


# --- SLURM -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_a_submitted_job_trains_on_two_nodes")
@pytest.mark.xdist_group("slurm")
def test_the_script_of_a_slurm_job(slurm):
    write_script('accelerator="cpu", devices=2, num_nodes=2, strategy="ddp"')
    python = Path(sys.executable).parent
    Path("job.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --time=24:00:00\n\nsrun python train.py\n"
    )
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    number = slurm.sbatch(Path("job.sh"), "--output=job.out", cwd=Path.cwd(), PATH=path)
    slurm.await_state(number, "COMPLETED", "FAILED", timeout=600)

    assert worlds() == [[4, 2, 2]] * 4, Path("job.out").read_text()


# --- Kubeflow ----------------------------------------------------------------------------------------------------


def pods(command, port, **more):
    """Return how two pods of a PyTorchJob start `command`, with the variables of the training operator (1.9)."""
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
        "WORLD_SIZE": "2", "PET_NNODES": "2", "PYTHONUNBUFFERED": "1", **more,
    }  # fmt: skip
    return [(command, shared | {"RANK": str(rank), "PET_NODE_RANK": str(rank)}) for rank in range(2)]


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_a_script_that_contradicts_the_command_is_refused")
@pytest.mark.parametrize("told", [{"PET_NPROC_PER_NODE": "1"}, {}])
def test_a_world_size_as_devices_is_refused_in_every_pod(told):
    """The guide asks each pod for as many processes as all pods have together.

    Where the job does not set the number, two processes start in each pod, where WORLD_SIZE is 4.
    """
    write_script('accelerator="cpu", devices=int(os.getenv("WORLD_SIZE", 1)), strategy="ddp"')
    codes, said = together(*pods(["train.py"], free_port(), **told), limit_s=300)

    assert codes == [1, 1], said
    for each in said:
        *_, sentence = (line for line in each.splitlines() if "Error: " in line)
        assert re.search(r"devices is (\d).*WORLD_SIZE(, which)? is '\1'", sentence), sentence
    assert worlds_written() == 0


@pytest.mark.sweep(guard="tests/cluster/test_run_command.py::test_the_pods_of_a_manifest_train_together")
def test_pods_train_together_with_devices_left_out():
    write_script('accelerator="cpu", strategy="ddp"')
    codes, said = together(*pods(["train.py"], free_port()))

    assert codes == [0, 0], said
    assert worlds() == [[2, 1, 2]] * 2


def worlds_written():
    return len(list(Path.cwd().glob("rank-*.json")))


# --- mpirun, in place of horovodrun ------------------------------------------------------------------------------


@pytest.mark.sweep(guard="tests/cluster/test_mpi.py::test_ranks_of_mpi_train_as_one_process")
def test_mpirun_starts_what_horovodrun_would(need):
    need("mpirun", package="openmpi-bin")
    write_script('accelerator="cpu", strategy="ddp"')
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = scripts.run(
        ["mpirun", "-np", "2", "--oversubscribe", sys.executable, "train.py"], env={**os.environ, **variables},
        capture_output=True, text=True, timeout=450, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert worlds() == [[2, 2, 1]] * 2
