"""A plugin that counts a run with values as a plan is counted: with the same counter and the same hooks."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from attrs import define, field
from torch.distributed import Work

from stratagem.api import hookimpl
from stratagem_plan.counter import StepCounter
from stratagem_plan.patches import counting_resizes
from stratagem_plan.planned import Planner


@define(eq=False, kw_only=True)
class Counted(Planner):
    """Writes to `folder` what the last step of each rank on the CPU has allocated, computed and sent."""

    folder: Path = field(converter=Path)
    counter: StepCounter = field(init=False, factory=lambda: StepCounter("cpu"))

    @hookimpl
    def prepare_module(self) -> None:
        """Leave the module its values."""

    def _begin(self) -> None:
        if self.run is not None:
            return
        wait = Work.wait

        def waited(*arguments):
            with self.counter.quiet():  # gloo reduces and scatters a copy of its own
                return wait(*arguments)

        for context in (mock.patch.object(Work, "wait", waited), counting_resizes(self.counter), self.counter):
            self._modes.enter_context(context)

    def _end_step(self) -> None:
        self.ends.append(+self.counter.now)
        if len(self.ends) < self.num_steps:
            self.counter.forget()
            return
        self._modes.close()
        peak = self.counter.peak
        told = {"peak": peak.total, "at_peak": peak.by, "phase": peak.phase, "end": self.ends[-1]}
        told["flops"] = self.counter.flops
        told["sent"] = [[*key, calls] for key, calls in sorted(self.counter.sent.items())]
        (self.folder / f"counted-{self.run.rank}.json").write_text(json.dumps(told))
