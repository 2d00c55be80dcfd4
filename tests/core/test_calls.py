"""What each step, each Trainer, each save and each resume costs, in calls of this library's functions.

Time depends on the machine, the number of calls does not: so they stay few. The ceilings may only be lowered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from programs import scripts
from stratagem.discovery import catalog, registry
from stratagem.stack.plugins import hook_implementations

#: By the way through the library: at most that many calls, with Python 3.11, which calls comprehensions.
CEILINGS = {
    "a step with one log": 58,
    "a second Trainer": 897,
    "a second save": 416,
    "a second resume, with 8 batches": 3_202,
}
EVENTS_OF_A_BATCH = {
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_before_zero_grad",
}  # fmt: skip


def test_calls_stay_below_their_ceilings(tmp_path):
    words = [sys.executable, str(Path(__file__).with_name("calls.py"))]
    done = scripts.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])

    assert found.keys() == CEILINGS.keys()
    more = {way: f"{number}, the ceiling is {CEILINGS[way]}" for way, number in found.items() if number > CEILINGS[way]}
    assert not more, more


def test_no_callback_of_every_run_listens_to_an_event_of_a_batch():
    for name in (*catalog.automatic("callback"), *catalog.automatic("trainer_callback")):
        implemented = hook_implementations(registry.find("callback", name).load(), of_class=True)

        assert not EVENTS_OF_A_BATCH & implemented.keys(), name
