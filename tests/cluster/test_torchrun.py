"""torchrun with two agents: workers killed, agents lost and added, errors."""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from ports import free_port
from programs import scripts
from stratagem_testing.reference import relative_difference

from . import torchrun
from .torchrun import Job, as_batch, kill

pytestmark = pytest.mark.xdist_group("torchrun")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def make(program, *options, folder=None, **variables):
        folder = folder or tmp_path
        shared = ["--monitor-interval", "0.1", "--local-addr", "127.0.0.1", *options]
        jobs.append(Job(folder, program, shared, variables))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def c10d(nodes="2", max_restarts=3, per_node=1):
    return (
        "--nnodes", nodes, "--nproc-per-node", str(per_node), "--max-restarts", str(max_restarts), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test",
    )  # fmt: skip


def host(is_host):
    return ("--rdzv-conf", f"last_call_timeout=2,is_host={is_host}")


def reference(tmp_path, **options):
    """The final weights of the same run, never interrupted, on two processes of one machine."""
    folder = tmp_path / "reference"
    folder.mkdir()
    options = {"more": "devices=2,"} | options
    options["more"] += "enable_checkpointing=True,"
    program = torchrun.script(folder, **options)
    text = program.read_text().replace('ckpt_path="last"', "ckpt_path=None")
    program.write_text(text)
    done = scripts.run([sys.executable, str(program), str(folder)], capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "final.pt")


def assert_equal(folder, weights):
    final = torch.load(folder / "final.pt")
    assert all(torch.equal(final[name], weights[name]) for name in weights)


def kill_at_random(job, kills, generator, within_s=2.0):
    """SIGKILL a worker of each attempt up to `within_s` seconds after it started: in imports, connecting or training."""
    for attempt in range(1, kills + 1):
        job.wait_for(f"attempt {attempt}", lambda attempt=attempt: job.attempts() >= attempt)
        time.sleep(generator.uniform(0, within_s))
        kill(int(generator.choice(job.lines("START")[-2:])[2]))


@pytest.mark.every_push("etcd")
@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_killed_workers_are_restarted_from_the_last_checkpoint_and_end_as_if_never_killed(
    tmp_path, start, request, backend
):
    program = torchrun.script(tmp_path)
    options = c10d if backend == "c10d" else functools.partial(by_etcd, backend, request.getfixturevalue("etcd"))
    job = start(program, *options(max_restarts=6))
    (tmp_path / "pace").write_text("0.05")
    start_two(job, backend)
    kill_at_random(job, 2, random.Random(0))

    codes = job.join()

    assert codes == {"0": 0, "1": 0}, job.logs()
    assert_equal(tmp_path, reference(tmp_path))
    assert job.attempts() == 3


# --- One agent: errors -------------------------------------------------------------------------------------------

RECORD = "from torch.distributed.elastic.multiprocessing.errors import record"
ALONE = ("--standalone", "--nproc-per-node", "2")


@pytest.mark.every_push("main()")
@pytest.mark.parametrize("main", ["main()", RECORD + "; record(main)()"])
def test_an_error_of_each_attempt_is_shown_and_is_in_torchruns_error_file(tmp_path, start, main):
    step = "assert not (rank == 1 and step == 1), f'sample {numbers[0]} is broken'"
    earlier = "sg.Run(strategy='ddp', accelerator='cpu').connect()"  # torch replaces the hook for uncaught errors
    program = torchrun.script(tmp_path, step=step, main=main, before=earlier)
    job = start(program, *ALONE, "--max-restarts", "1", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    job.start("0")

    assert job.join() == {"0": 1}

    assert job.attempts() == 2
    message = "AssertionError: sample [0-9]+ is broken"
    before, _, after = job.log("0").partition("=" * 60)
    assert len(re.findall(rf"^(?:\[rank1\]: )?{message}", before, re.MULTILINE)) == 2, before  # once in each attempt
    assert re.search(message, after)
    error = json.loads((tmp_path / "error.json").read_text())["message"]
    # torch compares whole seconds: of two ranks that fail in one it shows rank 0, which rank 1 made fail.
    assert re.search(message, error["message"])
    assert error["message"].startswith("PeerError: rank 1") or "in training_step" in error["extraInfo"]["py_callstack"]


def test_a_rank_that_leaves_early_without_an_error_is_named(tmp_path, start):
    program = torchrun.script(tmp_path, step="(rank == 1 and step == 1) and sys.exit(0)")
    job = start(program, *ALONE, "--max-restarts", "1")
    job.start("0")

    assert job.join() == {"0": 1}

    assert "rank 1 called sys.exit; it was in training_step" in job.log("0"), job.log("0")


# --- Many kills, lost and new agents -----------------------------------------------------------------------------


@pytest.fixture
def etcd(need, tmp_path):
    """An etcd server with the API that torchrun uses; its address."""
    need("etcd", package="etcd-server")
    pytest.importorskip("etcd", reason="pip install python-etcd")
    client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = [
        "etcd", "--enable-v2=true", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    with (tmp_path / "etcd.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(f"{client}/health", timeout=5).close()
            break
        except OSError:
            assert time.monotonic() < deadline, (tmp_path / "etcd.log").read_text()
            time.sleep(0.05)
    yield client.removeprefix("http://")
    server.kill()
    server.wait()


def by_etcd(backend, endpoint, nodes="2", max_restarts=3):
    options = "last_call_timeout=2" + (",keep_alive_interval=1" if backend == "etcd-v2" else "")
    return (
        "--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(max_restarts), "--rdzv-backend", backend,
        "--rdzv-endpoint", endpoint, "--rdzv-id", "test", "--rdzv-conf", options,
    )  # fmt: skip


@pytest.mark.sweep(
    guard="tests/cluster/test_torchrun.py::test_killed_workers_are_restarted_from_the_last_checkpoint_and_end_as_if_never_killed"
)
@pytest.mark.parametrize("backend", ["c10d", "etcd-v2", "etcd"])
def test_ten_kills_at_random_are_ten_recoveries(tmp_path, start, request, backend):
    program = torchrun.script(tmp_path, epochs=6)
    (tmp_path / "pace").write_text("0.3")
    options = c10d if backend == "c10d" else functools.partial(by_etcd, backend, request.getfixturevalue("etcd"))
    job = start(program, *options(max_restarts=10))
    start_two(job, backend)
    kill_at_random(job, 10, random.Random(1), within_s=4.0)
    (tmp_path / "pace").write_text("0")

    assert job.join() == {"0": 0, "1": 0}, job.logs()
    assert job.attempts() == 11
    assert_equal(tmp_path, reference(tmp_path, epochs=6))


def start_two(job, backend):
    """Start agents "0" and "1"; under c10d the first one hosts the rendezvous."""
    for number in range(2):
        job.start(str(number), *(host(str(number == 0)) if backend == "c10d" else ()))


def trains_with(job, world_size, steps):
    """Wait until rank 0 has trained `steps` more steps in a world of this size."""
    first = len(job.rows())

    def trained():
        rows = [as_batch(row[1:]) for row in job.rows()[first:] if row[0] == "BATCH"]
        return len({row.step for row in rows if row.world_size == world_size and row.rank == 0}) >= steps

    job.wait_for(f"{steps} steps of {world_size}", trained)


#: With a shared store a new agent waits for an address that torch 2.13 publishes only in the first round.
NEW_PORTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.sweep(
    guard="tests/cluster/test_torchrun.py::test_killed_workers_are_restarted_from_the_last_checkpoint_and_end_as_if_never_killed"
)
@pytest.mark.parametrize("backend", ["c10d", "etcd-v2", "etcd"])
def test_a_lost_agent_and_a_new_one_change_the_processes_and_not_the_steps(tmp_path, start, request, backend):
    same = {"epochs": 8, "dropout": 0.0, "callbacks": '{"name": "global_batch_size", "samples": 8},'}
    program = torchrun.script(tmp_path, **same)
    (tmp_path / "pace").write_text("0.2")
    options = c10d if backend == "c10d" else functools.partial(by_etcd, backend, request.getfixturevalue("etcd"))
    job = start(program, *options(nodes="1:2"), **NEW_PORTS)
    start_two(job, backend)
    trains_with(job, 2, 3)

    # Under c10d the agent that hosts the rendezvous must stay.
    job.kill_agent("1" if backend == "c10d" else job.agent_of_rank_0())
    trains_with(job, 1, 3)
    job.start("2", *(host("false") if backend == "c10d" else ()))
    trains_with(job, 2, 3)
    (tmp_path / "pace").write_text("0")

    assert set(job.join().values()) == {0}, job.logs()
    steps = job.samples_of_steps()
    assert sorted(steps) == list(range(8 * 12))
    for epoch in range(8):
        used = [sample for step in range(12 * epoch, 12 * epoch + 12) for sample in steps[step]]
        assert sorted(used) == list(range(96)), f"epoch {epoch}"
    assert {len(samples) for samples in steps.values()} == {8}
    final = torch.load(tmp_path / "final.pt")
    assert relative_difference(final, reference(tmp_path, **same)) < 1e-6


@pytest.mark.sweep(
    guard="tests/cluster/test_torchrun.py::test_killed_workers_are_restarted_from_the_last_checkpoint_and_end_as_if_never_killed"
)
def test_under_c10d_the_loss_of_the_agent_that_hosts_the_rendezvous_ends_the_others(tmp_path, start):
    program = torchrun.script(tmp_path, epochs=8)
    (tmp_path / "pace").write_text("0.2")
    job = start(program, *c10d(nodes="1:2"))
    start_two(job, "c10d")
    trains_with(job, 2, 3)

    job.kill_agent("0")

    assert job.join() == {"1": 1}
    assert "Rendezvous" in job.log("1")
    (tmp_path / "pace").write_text("0")
    again = start(program, *c10d(nodes="1:2"))
    again.start("3", *host("true"))
    assert again.join() == {"3": 0}, again.logs()
    pid = int(again.lines("START")[-1][2])
    assert min(batch.step for batch in again.batches() if batch.pid == pid) > 0  # from the last checkpoint


# --- The guide ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(
    guard="tests/cluster/test_torchrun.py::test_killed_workers_are_restarted_from_the_last_checkpoint_and_end_as_if_never_killed"
)
def test_the_script_of_the_guide_trains_and_goes_on_where_it_ended(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "torchrun.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(snippet)
    command = [sys.executable, "-m", "torch.distributed.run", *ALONE, "--max-restarts", "1", "train.py"]

    for is_first in (True, False):
        done = scripts.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=360)
        assert done.returncode == 0, done.stderr
        assert ("training begins at step 0" in done.stdout) is is_first
    assert list((tmp_path / "run").rglob("*.ckpt"))
