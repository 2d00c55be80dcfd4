"""torchrun with two agents: workers killed, agents lost and added, errors."""

from __future__ import annotations

import random
import sys
import time

import pytest
import torch

from stratagem_testing import scripts

from . import torchrun
from .torchrun import Job, free_port, kill

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
    done = scripts.run([sys.executable, str(program), str(folder)], capture_output=True, text=True, timeout=120)
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


def test_killed_workers_are_restarted_from_the_last_checkpoint_and_end_as_if_never_killed(tmp_path, start):
    program = torchrun.script(tmp_path)
    job = start(program, *c10d(max_restarts=6))
    (tmp_path / "pace").write_text("0.05")
    job.start("0", *host("true"))
    job.start("1", *host("false"))
    kill_at_random(job, 2, random.Random(0))

    codes = job.join()

    assert codes == {"0": 0, "1": 0}, job.logs()
    assert_equal(tmp_path, reference(tmp_path))
    assert job.attempts() == 3
