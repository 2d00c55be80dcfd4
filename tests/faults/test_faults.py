"""Runs that die or hang say which rank, why and where: real processes, with and without our launcher.

The programs of `make test` are forks of one that has imported torch; those of `make test-all` have interpreters of their own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port
from programs import scripts

from . import kinds

LAB = Path(__file__).with_name("lab.py")
#: Of a collective. It also limits the start, which takes long on a busy machine.
TIMEOUT_S = 15
STRATEGIES = ("ddp", "fsdp", "ddp_sharded", "parallel", "deepspeed_stage_2")
#: What a part of the strategies refuses, or does not notice, by design.
NOT_FOR = {
    "other_model": ("fsdp", "parallel", "deepspeed_stage_2", "ddp_sharded"),  # refused before training
    "parameter_written": ("fsdp", "ddp_sharded", "deepspeed_stage_2"),  # no replicas, or each step writes them again
}
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a full disk")


def run(kind, strategy, world_size, launcher, folder, start=scripts.run):
    words = [sys.executable, str(LAB), kind, strategy, str(world_size), launcher, str(TIMEOUT_S), str(folder / "run")]
    if launcher == "torchrun":
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = start(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = (done.stdout + done.stderr).splitlines(keepends=True)
    # what a slow machine is told
    return done.returncode, "".join(line for line in lines if not line.startswith("stratagem: waiting for rank"))


def check(kind, strategy, world_size, launcher, folder, start=scripts.run):
    code, text = run(kind, strategy, world_size, launcher, folder, start)

    assert code != 0, text
    assert kinds.judge(kind, text, world_size) == kinds.Judgement(rank=True, cause=True, place=True), text


#: The faults whose messages docs/postmortem.md shows, in its order.
OF_THE_PAGE = ("skip", "size", "segmentation_fault", "killed", "exit_0", "stopped", "deadlock_of_groups")
PAGE = Path(__file__).parents[2] / "docs" / "postmortem.md"


def without_numbers(text):
    """Return `text` on one line, without the numbers of lines and processes."""
    return re.sub(r"(lab\.py:|process )\d+", r"\1N", " ".join(text.split()))


@pytest.mark.every_push("skip", "exit_0")
@pytest.mark.parametrize("kind", OF_THE_PAGE)
def test_the_messages_of_the_page_are_those_of_runs(kind, tmp_path):
    text, _, _ = PAGE.read_text().partition("## It is slow")  # test_stragglers.py has the rest
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    shown = re.findall(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
    assert len(shown) == len(OF_THE_PAGE)
    start = subprocess.run if kind == "exit_0" else scripts.run  # one as its users start it
    code, text = run(kind, "ddp", 3, "fork", tmp_path, start)

    assert code != 0, text
    assert kinds.judge(kind, text, 3) == kinds.Judgement(rank=True, cause=True, place=True), text
    found, _, _ = without_numbers(shown[OF_THE_PAGE.index(kind)]).rpartition(
        "; "
    )  # a rank that is told has other advice
    assert found in without_numbers(text), text


def test_torchrun_ends_the_others_and_one_of_them_says_why(tmp_path):
    check("size", "ddp", 2, "torchrun", tmp_path)
    (folder,) = tmp_path.glob("stratagem-*")
    shown = scripts.run(
        [sys.executable, "-m", "stratagem", "postmortem", str(folder)], capture_output=True, text=True, check=False
    )

    assert shown.returncode == 0, shown.stderr
    assert "all_reduce() of 3 elements of float32" in shown.stdout.splitlines()[0]


def test_a_rank_that_was_interrupted_is_named_under_the_default_launcher(tmp_path):
    check("interrupted", "ddp", 3, "subprocess", tmp_path)


def test_two_machines_compare_what_their_ranks_did(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    machines = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        words = [
            *torchrun,
            "--node-rank",
            str(node),
            str(LAB),
            "skip",
            "ddp",
            "4",
            "torchrun",
            str(TIMEOUT_S),
            str(folder),
        ]
        words += ["2", "3"]
        machines.append(scripts.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    texts = [machine.communicate(timeout=300)[0] for machine in machines]

    for text in texts:
        assert "rank 3 did not call all_reduce() of 7 elements of float32 (lab.py:" in text, "\n".join(texts)
        assert "in which ranks 0, 1 and 2 wait" in text


EVERY = [
    pytest.param(kind, marks=NEEDS_ROOT if kind == "rank_0_full_disk" else ()) for kind in kinds.KNOWN | kinds.SET_ASIDE
]


@pytest.mark.sweep(guard="tests/faults/test_faults.py::test_the_messages_of_the_page_are_those_of_runs")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", EVERY)
def test_each_kind_under_each_strategy(kind, strategy, tmp_path):
    if strategy in NOT_FOR.get(kind, ()):
        pytest.skip("the strategy refuses it, or does not notice it")
    check(kind, strategy, 2 if strategy != "ddp" else 3, "fork", tmp_path, subprocess.run)


@pytest.mark.sweep(guard="tests/faults/test_faults.py::test_torchrun_ends_the_others_and_one_of_them_says_why")
@pytest.mark.parametrize("kind", EVERY)
def test_each_kind_under_torchrun(kind, tmp_path):
    check(kind, "ddp", 3, "torchrun", tmp_path, subprocess.run)


def test_torchrun_does_not_see_that_a_rank_called_exit_and_the_others_say_it(tmp_path):
    check("sys_exit_0", "ddp", 2, "torchrun", tmp_path)


@pytest.mark.parametrize("kind", ["skip", "rank_0_killed", "other_root"])
def test_the_end_of_the_rank_that_launched_the_others_is_told(kind, tmp_path):
    check(kind, "ddp", 3, "subprocess", tmp_path)


def test_nothing_is_told_of_a_signal_that_was_meant_to_end_the_run(tmp_path):
    code, text = run("rank_0_terminated", "ddp", 2, "subprocess", tmp_path)

    assert code == -signal.SIGTERM
    assert "stratagem:" not in text
    assert list(tmp_path.glob("stratagem-*")) == []


def test_no_rank_is_blamed_for_the_end_of_the_launcher(tmp_path):
    code, text = run("launcher_killed", "ddp", 2, "fork", tmp_path)
    (folder,) = tmp_path.glob("stratagem-*")
    told = scripts.run(
        [sys.executable, "-m", "stratagem", "postmortem", str(folder)], capture_output=True, text=True, check=False
    )

    assert (code, text) == (-signal.SIGKILL, "")
    assert told.returncode == 4
    assert told.stdout.startswith("the evidence does not tell which rank made this run end\n")


def test_a_run_that_ends_well_leaves_no_file(tmp_path):
    for launcher in ("fork", "subprocess", "torchrun"):
        code, text = run("none", "ddp", 2, launcher, tmp_path)

        assert code == 0, text
        assert "trained to the end" in text
        assert list(tmp_path.glob("stratagem-*")) == []
