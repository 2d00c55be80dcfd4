"""Counts a run with values, on the CPU, by the counter of a plan."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import define, field

from stratagem_plan.counter import StepCounter
from stratagem_plan.planned import Planner


@define(eq=False, kw_only=True)
class Counted(Planner):
    """Writes what a rank held and computed in its second step to `folder`."""

    folder: Path = field(converter=Path)
    counter: StepCounter = field(init=False, factory=lambda: StepCounter("cpu"))

    def _begin(self) -> None:
        if self.run is None:
            self._modes.enter_context(self.counter)

    def _end_step(self) -> None:
        self.ends.append(+self.counter.now)
        if len(self.ends) == 1:
            self.counter.forget()
            return
        peak = self.counter.peak
        told = {"peak": peak.total, "at_peak": peak.by, "phase": peak.phase, "end": self.ends[-1]}
        told["flops"] = self.counter.flops
        (self.folder / f"counted-{self.run.rank}.json").write_text(json.dumps(told))
