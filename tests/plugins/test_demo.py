"""`stratagem demo` trains in two processes, writes, and goes on when it is run again."""

from __future__ import annotations

import re
import subprocess
import sys


def demo(folder):
    command = [sys.executable, "-m", "stratagem", "demo", "--steps", "4", "--batch-size", "4", "--precision", "32-true"]
    return subprocess.run(
        [*command, "--devices", "2"], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_demo_runs_and_resumes(tmp_path):
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "2 processes on cpu, effective batch size 8" in first.stdout
    assert "after 4 steps; it now writes" in first.stdout
    assert "The Python language" in first.stdout
    assert "twice" not in first.stderr

    second = demo(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "going on from the checkpoints" in second.stdout
    assert re.search(r"validation loss [\d.]+ nats per character after 8 steps", second.stdout)
