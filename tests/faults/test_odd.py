"""Runs without a fault, however unusual they are, blame nobody: real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from programs import scripts

from . import odd

SCRIPT = Path(odd.__file__)
#: What a diagnosis would have.
CLAIMS = re.compile(
    r"^stratagem: (?!waiting)|postmortem|\branks? \d[\d, and]* (did not|called|was|were|is|are|exited|has heard|have|lost"
    r"|waits?|failed|ran)\b",
    re.MULTILINE,
)


def run(what, folder, start=scripts.Popen):
    """Return the exit code, the output and the folders that a variant left."""
    chosen, temporary, work = odd.variant(what), folder / "temporary", folder / "work"
    temporary.mkdir(parents=True)
    work.mkdir()
    words = [sys.executable, str(SCRIPT), what, str(work)]
    if chosen["launcher"] == "torchrun":
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", chosen["world"]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    with (folder / "out").open("w") as out:
        process = start(words, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if chosen["outside"] != "nothing":
                send(process, chosen["outside"], work / "ready.0")
            code = process.wait(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    deadline = time.monotonic() + 20  # after os._exit another process looks, and clears up
    while (left := [*temporary.glob("stratagem-*")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return code, (folder / "out").read_text(), left


def send(process, outside, ready):
    """Send a signal once the run trains: to the process that was started, or to all of them."""
    while not ready.exists() and process.poll() is None:
        time.sleep(0.05)
    name, _, to_all = outside.partition("_")
    if process.poll() is None:
        (os.killpg if to_all else os.kill)(process.pid, signal.Signals[name])


def check(what, folder, start=scripts.Popen):
    chosen = odd.variant(what)
    code, text, left = run(what, folder, start)

    assert CLAIMS.search(text) is None, text
    if chosen["launcher"] != "torchrun" or not (chosen["end"] == "os_exit" or chosen["outside"] != "nothing"):
        assert left == []  # torchrun does not clear up for a process that cannot
    if chosen["outside"] == "nothing":
        assert code == 0, text
        assert "trained to the end" in text or chosen["end"] == "sys_exit_in_fit", text


#: Which of them said once that a rank was at fault, or left files.
TELLING = (
    "end=os_exit,collective=objects",
    "script=caught,end=os_exit",
    "outside=SIGTERM_to_all,collective=all_reduce,world=3",
    "launcher=torchrun,script=fit_test_fit,process=gc,close=yes",
    "launcher=torchrun,end=sys_exit_in_fit",
)


@pytest.mark.parametrize("what", TELLING)
def test_an_unusual_run_without_a_fault_blames_nobody(what, tmp_path):
    check(what, tmp_path)


@pytest.mark.sweep(guard="tests/faults/test_odd.py::test_an_unusual_run_without_a_fault_blames_nobody")
@pytest.mark.parametrize("number", range(200))
def test_each_variant_blames_nobody(number, tmp_path):
    check(str(number), tmp_path, subprocess.Popen)
