"""Which environment is chosen where several are present, and what contradicts each other."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.api import Confidence, Evidence
from stratagem.errors import ConfigError
from stratagem.stack.detection import choose, environment_candidates
from stratagem_devtools.environments import why_not

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_PORT": "1",
}  # fmt: skip
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "1",
}  # fmt: skip
POD = {
    "PET_NODE_RANK": "1", "PET_NNODES": "2", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "j", "MASTER_PORT": "2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}  # fmt: skip
BY_HAND = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
BY_NODE = {"NODE_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "1"}
#: What a launcher of this program sets.
LAUNCHED = BY_HAND | {"NODE_RANK": "0", "GROUP_WORLD_SIZE": "1", "STRATAGEM_STORE_HOSTED": "1"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}  # fmt: skip


@pytest.fixture
def within(monkeypatch):
    pytest.importorskip("stratagem_environments_schedulers")

    def enter(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return environment_candidates()

    return enter


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, "local"),
        (SLURM, "slurm"),
        (BY_HAND, "local"),
        (SLURM | TORCHRUN, "torchelastic"),
        (
            SLURM | TORCHRUN | {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"},
            "torchelastic",
        ),  # one was lost
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "torchelastic"),
        (POD | TORCHRUN, "torchelastic"),
        (SLURM | OPEN_MPI, "mpi"),
        (OPEN_MPI | {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "mpi"),  # in a script of sbatch
        (TORCHRUN | {"SLURM_JOB_ID": "7"}, "torchelastic"),
        (SLURM | BY_HAND, "slurm"),  # a script exports what SLURM tells, for others
        (BY_HAND | {"SLURM_JOB_ID": "7"}, "local"),
        (BY_NODE | {"SLURM_JOB_ID": "7"}, "local"),
        (LAUNCHED | {"SLURM_JOB_ID": "7"}, "slurm"),  # as in the process that launched it
        (LAUNCHED | {"SLURM_JOB_ID": "7", "GROUP_WORLD_SIZE": "2"}, "local"),
        (LAUNCHED | POD | {"LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"}, "kubeflow"),
        (JSRUN | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1"}, "mpi"),  # jsrun with Spectrum MPI
        (SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "5"}, "slurm"),  # srun --mpi=pmi2
        ({"PMI_RANK": "1", "SLURM_JOB_ID": "7"}, "mpi"),  # and is refused: half of the variables
    ],
)
def test_the_innermost_starter_is_chosen(within, variables, chosen):
    assert choose(within(variables)).entry.name == chosen


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            SLURM | JSRUN,
            "environment 'lsf' .JSM_NAMESPACE_RANK is '1' and JSM_NAMESPACE_SIZE is '4'. and environment 'slurm' "
            ".SLURM_STEP_ID is '0' and SLURM_PROCID is '1' and SLURM_STEP_NUM_TASKS is '2'. both started this process, "
            'and they contradict each other: world_size 4 and 2; .* set environment="lsf" or environment="slurm"',
        ),
        (SLURM | BY_HAND | {"RANK": "0", "LOCAL_RANK": "0"}, "rank . and .; expected two that agree, or one; set envi"),
        (
            SLURM | TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
            "contradict each other: 1 and 2 processes; expected at least 2 processes: otherwise several of them train sep",
        ),
        (  # `srun --ntasks=2 torchrun --standalone`
            SLURM | TORCHRUN | {"GROUP_WORLD_SIZE": "1"},
            "contradict each other: torchelastic was started 1 times and slurm has 2 tasks; expected one of them in each",
        ),
    ],
)
def test_two_that_contradict_each_other_are_refused(within, variables, message):
    within(variables)
    with pytest.raises(ConfigError, match=message):
        sg.Run(accelerator="cpu")
    assert sg.Run(accelerator="cpu", environment="slurm").place.rank == 1


def test_the_losers_reasons_are_told(within):
    winner, *others = within(SLURM | TORCHRUN)
    reasons = {each.entry.name: why_not(each, winner) for each in others}

    assert winner.entry.name == "torchelastic"
    assert reasons["slurm"] == "torchelastic is started within it (precedence 100 to 50)"
    assert reasons["mpi"] == "none of its variables is set"
    assert reasons["local"] == "torchelastic is started within it (precedence 100 to 50)"


def test_evidence_is_shown_with_its_confidence(within):
    within(SLURM)

    assert "(certain)" in sg.Run(accelerator="cpu").stack.environment.reason
    assert str(Evidence("X is set", Confidence.IN_JOB)) == "X is set (in job)"
    assert Confidence.CERTAIN > Confidence.PARTIAL > Confidence.IN_JOB > Confidence.FALLBACK
