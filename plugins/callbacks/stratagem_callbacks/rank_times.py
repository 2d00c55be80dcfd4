"""What a rank spends its steps on, and which rank is slower than the others.

[Note: own time]
Ranks that average gradients end each step together, so the time of a whole step tells nothing about one of them. A
rank's *own* time is what it spends before it waits for others. A phase in which collectives began may contain such a
wait and is *unclear*: it is not compared. The groups count their collectives, whoever calls them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

#: What is measured. The first four are a rank's own; "the rest" is what callbacks do, and a broadcast of buffers.
PHASES = ("next batch", "training_step", "backward", "optimizer step", "waiting", "the rest")
NEXT_BATCH, TRAINING_STEP, BACKWARD, OPTIMIZER_STEP, WAITING, REST = range(len(PHASES))
#: What is not measured: validation, and the end of an epoch.
OUTSIDE = len(PHASES)
_NUM_OWN = 4


@frozen
class Straggler:
    """A rank that is slower than the others, and the phase in which it loses most."""

    rank: int
    phase: int
    #: Seconds of this phase in a step, and the median of all ranks.
    seconds: float
    median: float
    #: What it adds to a step, as a share of the step without it.
    share: float


def told(unclear: Sequence[Sequence[float]]) -> list[int]:
    """Return the phases that can be compared, from what was `unclear` on each rank: (ranks, own phases)."""
    clear = [not any(marks) for marks in zip(*unclear, strict=True)]
    clear[BACKWARD] &= clear[TRAINING_STEP]  # autograd repeats the collectives of a forward
    return [phase for phase, is_clear in enumerate(clear) if is_clear]


def stragglers(seconds: Sequence[Sequence[float]], phases: Sequence[int], threshold: float) -> list[Straggler]:
    """Return the ranks that make a step longer by more than the share `threshold`, the slowest first.

    Args:
        seconds: of each phase of `PHASES` in a step, of each rank: (ranks, phases).
        phases: those that can be compared.
        threshold: how much.
    """
    own = [sum(row[phase] for phase in phases) for row in seconds]
    usual = median_low(own)
    medians = {phase: median_low(row[phase] for row in seconds) for phase in phases}
    found = []
    for rank, row in enumerate(seconds):
        excess = own[rank] - usual
        without = sum(row) - excess
        if excess > threshold * without:
            worst = max(phases, key=lambda phase: row[phase] - medians[phase])
            found.append(Straggler(rank, worst, row[worst], medians[worst], excess / without))
    return sorted(found, key=lambda each: -each.share)


class HostClock:
    """Adds up the seconds of each phase, on the host."""

    def __init__(self) -> None:
        self.phase = OUTSIDE
        self._unclear = [0.0] * _NUM_OWN
        self._groups: list[Any] = []
        self._begun = 0
        self._seconds, self._since = [0.0] * (OUTSIDE + 1), time.perf_counter()

    def enter(self, phase: int, waits: bool = True) -> None:
        """End the present phase and begin `phase`; without `waits` the collectives of the present one did not wait."""
        begun = 0
        for group in self._groups:
            begun += group._get_sequence_number_for_group()
        if begun != self._begun:
            self._begun = begun
            if waits and self.phase < _NUM_OWN:
                self._unclear[self.phase] = 1.0
        self._mark(phase)
        self.phase = phase

    def _mark(self, phase: int) -> None:
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        self._since = now

    def take(self, ignored: Any) -> list[float] | None:
        """Return the seconds of `PHASES` since the last call, and which of the own phases were unclear.

        Args:
            ignored: a group in whose collectives no rank waits.
        """
        unclear, self._unclear = self._unclear, [0.0] * _NUM_OWN
        self._groups = _backends(ignored)
        self._begun = sum(group._get_sequence_number_for_group() for group in self._groups)
        return self._measured(unclear)

    def _measured(self, unclear: list[float]) -> list[float] | None:
        seconds, self._seconds = self._seconds, [0.0] * (OUTSIDE + 1)
        return seconds[:OUTSIDE] + unclear


class DeviceClock(HostClock):
    """Adds up the seconds of each phase on the device's stream.

    Events are read one window later, when all of them have happened: the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._event: Any = torch.get_device_module(device).Event
        self._marks: list[tuple[int, Any]] = []
        self._earlier: tuple[list[tuple[int, Any]], list[float]] | None = None

    def _mark(self, phase: int) -> None:
        event = self._event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def _measured(self, unclear: list[float]) -> list[float] | None:
        earlier, self._earlier = self._earlier, (self._marks, unclear)
        self._marks = self._marks[-1:]
        if earlier is None:
            return None
        marks, unclear = earlier
        marks[-1][1].synchronize()
        seconds = [0.0] * (OUTSIDE + 1)
        for (phase, begin), (_, end) in itertools.pairwise(marks):
            seconds[phase] += begin.elapsed_time(end) / 1e3
        return seconds[:OUTSIDE] + unclear


def _backends(ignored: Any) -> list[Any]:
    """Return what counts the collectives of each group of this process, but for that of `ignored`."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return list({each._get_backend(device) for each in groups if each is not ignored for device in each._device_types})
