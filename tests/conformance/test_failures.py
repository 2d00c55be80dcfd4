"""A failure of the kit tells the author of a plugin what is wrong, and where."""

from __future__ import annotations

import pytest
from mutants import MUTANTS

from stratagem.discovery import registry
from stratagem_testing import command

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MissingAllReduce", ["rank 1", "rank 0", "`backward`", "average"]),
        ("SumForMean", ["one process", "1.0e-06 (`tolerance`)", "all tensors", "not sum"]),
        ("LastParameterForgotten", ["net.4.bias", "every gradient"]),
        ("ForgottenMomentum", ["right before the checkpoint", "`optimizer_state`", "momentum"]),
        ("LeakedThread", ["threads: ", "`teardown`"]),
        ("RankDependentBranchAroundACollective", ["all_reduce() (mutants.py:", "call it on every rank"]),
        ("UnusedParametersCrash", ["raised AttributeError: 'NoneType' object has no attribute"]),
        ("ClaimsToClipByValue", ["`clip_gradients`"]),
        ("LoadsLoosely", ["other names", "`load_model_state`", "`strict`"]),
        ("StateUnderAnOption", ["count of every 1", "leave every out of `state_key`"]),
        ("PolicyClaimsAnotherDtype", ["`policy`", "{'torch.bfloat16'}, expected {'torch.float16'}"]),
        ("ScaleNeverShrinks", ["none of 12 batches", "loss scale", "shrink after an overflow"]),
        ("SumsOverTheRanks", ["gradients", "`tolerance`", "mean, not the sum"]),
        ("HidesOverflow", ["`reduce_bucket`", "infinite"]),
    ],
)
def test_the_first_line_of_a_failure_names_the_reason(name, words):
    _, error = BY_NAME[name].failure()
    sentence = str(error).splitlines()[0]

    assert [word for word in words if word not in sentence] == [], sentence


def test_a_traceback_of_a_process_has_frames_of_the_plugin_alone():
    _, error = BY_NAME["UnusedParametersCrash"].failure()
    files = [line.split('"')[1].rpartition("/")[2] for line in str(error).splitlines() if line.startswith("  File ")]

    assert set(files) == {"mutants.py"}


WRONG = """
import stratagem as sg


class Wrong(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        return 1 / batch_idx
"""


@pytest.mark.slow
def test_the_check_command_ends_with_a_line_for_each_failure(install, capfd):
    install("wrong", {"stratagem.callback": {"wrong": "Wrong"}}, WRONG)
    rows = command.check(registry.find("callback", "wrong"), world_sizes=(1,))
    failed = [row for row in rows if row["outcome"] == "failed"]
    printed = capfd.readouterr().out

    said = "rank 0 raised ZeroDivisionError: division by zero"
    assert [row["reason"].splitlines()[0] for row in failed].count(said) >= 2
    assert f"test_every_stage_runs_with_it[1]: {said}\n" in printed
    assert printed.splitlines()[-1].startswith("begin with the first")
    assert "return 1 / batch_idx" in printed
    assert "stratagem_testing/" not in printed.partition("short test summary")[0]


HANGS = """
import time

import stratagem as sg


class Hangs(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, run):
        time.sleep(1000 * run.rank)
"""


@pytest.mark.slow
def test_a_plugin_that_hangs_is_checked_twice_and_not_forty_times(install, capfd):
    install("hangs", {"stratagem.callback": {"hangs": "Hangs"}}, HANGS)
    rows = command.check(registry.find("callback", "hangs"), world_sizes=(2,), limit_s=2)

    assert [row["outcome"] for row in rows].count("failed") == 2
    printed = capfd.readouterr().out
    assert "two checks did not end within `limit_s`" in printed
    assert "were still running at the time limit" in printed


@pytest.mark.slow
def test_the_full_trace_shows_all_frames(install, capfd):
    install("wrong", {"stratagem.callback": {"wrong": "Wrong"}}, WRONG)
    command.check(registry.find("callback", "wrong"), full_trace=True, world_sizes=(1,))

    assert "/stratagem_trainer/loops.py" in capfd.readouterr().out
