"""Checks of what `stratagem plan` says of the strategy: a run with values sends and holds the same."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem.discovery import registry
from stratagem_testing.conformance import refusal
from stratagem_testing.expectations import expect_equal
from stratagem_testing.processes import LAUNCH_VARIABLES
from stratagem_testing.reference import Batch, Net
from stratagem_testing.strategy.base import StrategyChecks
from stratagem_testing.training import share

#: Steps of a run, the last of which is compared: DDP makes new buckets in the second, and strategies may check steps 1,
#: 2, 4 and so on, which a plan leaves out.
_STEPS = 3
#: Ranks decide by smaller messages, which a plan leaves out. The weights and long biases of the model are larger.
_SMALLEST_BYTES = 512
#: A process on the CPU has the state of its random numbers and the optimizer's numbers of steps there.
_ON_THE_CPU_BYTES = 16 << 10
#: Seconds that a plan may take.
_LIMIT_S = 300
#: Exit codes of `stratagem plan`.
_FITS, _CANNOT_BE_PLANNED = 0, 3


class PlanChecks(StrategyChecks):
    """A plan says what a run sends, holds and computes."""

    #: Why `stratagem plan` cannot plan the strategy: words of its message. "" where it can, None where it may.
    unplannable: ClassVar[str | None] = ""
    #: Share of the peak of a run that its plan may leave out.
    peak_tolerance: ClassVar[float] = 0.01
    #: What starts `stratagem plan`: a subclass of `subprocess.Popen` may start it faster.
    popen: ClassVar[type[subprocess.Popen[str]]] = subprocess.Popen

    def test_a_plan_says_what_a_run_sends_and_holds(self, world_size: int) -> None:
        """Calls and bytes of every collective of a step are equal, and a plan's peak is not below that of the run.

        A plan is for a GPU, where a strategy may hold more than on the CPU of this run.
        """
        if reason := refusal(lambda: registry.find("command", "plan")):
            pytest.skip(reason)
        self._require_size(world_size)
        module, batches = self.maker(_Wide)(), self.batches(_STEPS)

        counted = [] if self.unplannable else self._run(world_size, _count, module, batches)
        classes = self._planned(world_size, module, batches)

        for each in classes:
            of_class = range(world_size) if len(classes) == 1 else [each["rank"]]
            for rank in of_class:
                planned, sent = _planned_messages(each), _messages(counted[rank]["sent"])
                look = f"rank {rank}: hooks must do the same where `run.environment.simulated`, or set `unplannable`"
                found = planned - sent, sent - planned
                expect_equal("messages that were only planned, and only sent", found, (Counter(), Counter()), look)
                peak = each["peak"] - each["at_peak"]["libraries"]
                left_out = max(self.peak_tolerance * peak, _ON_THE_CPU_BYTES)
                assert peak >= counted[rank]["peak"] - left_out, (
                    f"the plan's peak is {peak} bytes, {each['at_peak']}, and the run held {counted[rank]['peak']}, "
                    f"{counted[rank]['at_peak']}; {look}; set `peak_tolerance` for what a plan may leave out"
                )

    def _planned(self, world_size: int, module: sg.Module, batches: list[Batch]) -> list[dict[str, Any]]:
        """Return the classes of ranks of the strategy's plan; skip the check if it refuses as it is said to."""
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as name:
            folder = Path(name)
            (folder / "job").write_bytes(pickle.dumps((self._arguments(world_size), module, batches)))
            script = Path(__file__).with_name("planned_script.py")
            words = ["--devices", str(world_size), "--json", str(folder / "plan"), str(script), str(folder / "job")]
            clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
            with self.popen(
                [sys.executable, "-m", "stratagem", "plan", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, cwd=folder, env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)},
            ) as process:  # fmt: skip
                try:
                    output, errors = process.communicate(timeout=_LIMIT_S)
                finally:
                    process.kill()
            if self.unplannable is None and process.returncode == _CANNOT_BE_PLANNED:
                pytest.skip(errors)
            if self.unplannable:
                said = f"`unplannable` is {self.unplannable!r}, and"
                assert process.returncode == _CANNOT_BE_PLANNED, f"{said} the strategy can be planned: {output}"
                assert self.unplannable in errors, f"{said} planning is refused for another reason: {errors}"
                pytest.skip(errors)
            assert process.returncode == _FITS, f"`stratagem plan` failed; set `unplannable` if it must: {errors}"
            classes: list[dict[str, Any]] = json.loads((folder / "plan").read_text())["classes"]
        return classes


def _planned_messages(ranks: dict[str, Any]) -> Counter[tuple[str, str, int, int]]:
    """Return how often a planned rank sends each message: phase, collective, number of ranks, bytes."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    for each in ranks["collectives"]:
        if each["payload"] >= _SMALLEST_BYTES:
            found[each["phase"], each["op"], each["ranks"], each["payload"]] += each["calls"]
    return found


def _messages(sent: list[Any]) -> Counter[tuple[str, str, int, int]]:
    """Return the same of a rank that was counted."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    for phase, collective, ranks, payload, calls in sent:
        if payload >= _SMALLEST_BYTES:
            found[phase, collective, len(ranks), payload] += calls
    return found


#: Of the middle layers: what a process allocates beside the model is small, and messages are below the megabyte from
#: which a strategy on the CPU may have another way to send them.
_WIDTH = 480


class _Wide(Net):
    """A model for plans."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.net = nn.Sequential(
                nn.Linear(16, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1)
            )  # fmt: skip


# --- In each process ---------------------------------------------------------------------------------------------


def fit(choose: dict[str, Any], module: sg.Module, batches: list[Batch], *plugins: Any) -> None:
    """Train `module` for as many steps as a plan has."""
    plugins = (*choose.get("plugins", ()), *plugins)
    trainer = sg.Trainer(**(choose | {"max_steps": _STEPS, "plugins": list(plugins)}))
    trainer.fit(module, share(trainer, batches))


def _count(rank: int, size: int, choose: dict[str, Any], module: sg.Module, batches: list[Batch]) -> dict[str, Any]:
    """Return what the last step of this rank has sent and held."""
    counter = registry.find("command", "plan").load()().counted()
    counter.num_steps = _STEPS
    fit(choose, module, batches, counter)
    told: dict[str, Any] = counter.told
    return told
