"""`rank_zero_only` before, in and after a run."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem_testing.processes import run_in_processes
from stratagem_trainer import rank_zero


@sg.rank_zero_only
def name(rank):
    """Return a name."""
    return f"rank {rank}"


@pytest.fixture(autouse=True)
def nothing_detected():
    rank_zero._detected_rank.cache_clear()
    yield
    rank_zero._detected_rank.cache_clear()


@pytest.mark.parametrize(("variables", "expected"), [({}, "rank 7"), ({"RANK": "0"}, "rank 7"), ({"RANK": "1"}, None)])
def test_before_a_run_the_variables_of_the_process_decide(monkeypatch, variables, expected):
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)

    assert name(7) == expected
    assert (name.__name__, name.__doc__) == ("name", "Return a name.")


def test_a_task_of_a_scheduler_is_asked_for_its_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for variable, value in {"SLURM_JOB_ID": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0",
                            "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "train",
                            "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}.items():  # fmt: skip
        monkeypatch.setenv(variable, value)

    assert name(7) is None


def _in_a_run(rank, world_size):
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    return run.launch(lambda run: (name(run.rank), sg.rank_zero_only(lambda: "one", default="none")()))


def test_in_a_run_the_rank_of_the_process_group_decides():
    assert run_in_processes(_in_a_run, 2) == [("rank 0", "one"), (None, "none")]
