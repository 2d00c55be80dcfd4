"""`stratagem demo` trains in two processes, writes, and goes on when it is run again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from stratagem_testing import scripts


def demo(folder):
    command = [sys.executable, "-m", "stratagem", "demo", "--steps", "4", "--batch-size", "4", "--precision", "32-true"]
    return scripts.run(
        [*command, "--devices", "2"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_demo_runs_and_resumes(tmp_path):
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "2 processes on cpu, effective batch size 8" in first.stdout
    assert "after 4 steps; generated text" in first.stdout
    assert "The Python language" in first.stdout
    assert "twice" not in first.stderr

    second = demo(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "continuing from the checkpoints" in second.stdout
    assert re.search(r"validation loss [\d.]+ nats per character after 8 steps", second.stdout)


@pytest.mark.slow
@pytest.mark.sweep
def test_ctrl_c_before_the_first_save_loses_nothing(tmp_path):
    command = [sys.executable, "-u", "-m", "stratagem", "demo", "--steps", "100000", "--batch-size", "2"]
    process = scripts.Popen(
        [*command, "--precision", "32-true", "--devices", "2"], cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 360
        while not list(tmp_path.glob("demo_run/stratagem_logs/*/")) and time.monotonic() < deadline:  # after 10 steps
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    assert "saving every 250 steps, at the end and on Ctrl-C" in said
    assert process.returncode != 0
    saved = re.search(r"on_exception_checkpoint: saved (\S+) after step (\d+)", said)
    if saved is None:  # the ranks were at different steps
        assert "on_exception_checkpoint could not save" in said, said
    else:
        assert (tmp_path / saved[1]).exists()
