"""What plans are compared with: what torch's allocator reserves, and the memory in which runs fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

#: Takes and gives memory at random, on two streams; prints what is reserved after each step, said and counted.
SCRIPT = """
import json, random, sys
import torch
from stratagem_plan.allocator import GRAIN, Allocator

draw, allocator, live, told = random.Random(0), Allocator(sys.argv[1] == "True"), [], []
streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
for _ in range(2000):
    if live and draw.random() < 0.48:
        tensor, block = live.pop(draw.randrange(len(live)))
        del tensor
        allocator.give(block)
    else:
        size, stream = int(2 ** draw.uniform(9, 27)) // GRAIN * GRAIN, draw.choice(streams)
        with torch.cuda.stream(stream):
            live.append((torch.empty(size, dtype=torch.uint8, device="cuda"), allocator.take(size, stream)))
    told.append([torch.cuda.memory_reserved(), allocator.reserved])
print(json.dumps(told))
"""


@pytest.mark.parametrize("is_expandable", [False, True])
def test_the_allocator_reserves_what_a_plan_counts(is_expandable):
    variables = os.environ | {"PYTORCH_ALLOC_CONF": f"expandable_segments:{is_expandable}"}
    command = [sys.executable, "-c", SCRIPT, str(is_expandable)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)

    assert [real for real, _ in json.loads(done.stdout)] == [planned for _, planned in json.loads(done.stdout)]


PLAN = Path(__file__).parents[1] / "plan"
TRAIN = PLAN / "train_gpt.py"
ROWS = json.loads((PLAN / "memory.json").read_text())["rows"]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_run_needs_what_was_measured(number, tmp_path):
    """The file is what plans are compared with on machines without a GPU."""
    row = ROWS[number]
    given = row["given"] | {"vocab": 50304, "length": 1024}
    (allocated, reserved), _ = _train(given, tmp_path)
    fitting = []
    for memory, _ in row["limits"]:
        peaks, errors = _train(given | {"memory": memory}, tmp_path)
        assert peaks or "OutOfMemoryError" in errors, errors[-2000:]
        fitting.append([memory, bool(peaks)])

    assert [allocated, reserved] == pytest.approx([row["allocated"], row["reserved"]], rel=0.002)
    assert fitting == row["limits"]


def _train(given, folder):
    """Return the bytes that the run has allocated and reserved, None if it ended early; and what it has printed."""
    peaks = folder / "peaks.json"
    peaks.unlink(missing_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, str(TRAIN), json.dumps(given | {"peaks": str(peaks)})]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=False)
    return json.loads(peaks.read_text()) if peaks.exists() else None, done.stderr
