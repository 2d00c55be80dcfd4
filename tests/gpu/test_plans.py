"""What a plan takes torch's allocator to reserve is what it reserves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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
