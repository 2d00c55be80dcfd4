"""Count a run with values on the CPU as a plan is counted: with the same counter and the same hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from attrs.converters import optional
from torch.distributed import Work

from stratagem.api import hookimpl
from stratagem_plan.counter import StepCounter
from stratagem_plan.patches import counting_resizes, quiet_shapes, replaced
from stratagem_plan.planned import Planner


@define(eq=False, kw_only=True)
class Counted(Planner):
    """Tells what the last of `num_steps` steps of this rank has allocated, computed and sent."""

    #: Where each rank writes ``counted-RANK.json``.
    folder: Path | None = field(default=None, converter=optional(Path))
    counter: StepCounter = field(init=False, factory=lambda: StepCounter("cpu"))
    #: ``peak``, ``end`` and ``at_peak`` in bytes, the peak's ``phase``, ``flops``, and ``sent``: lists of phase,
    #: collective, ranks, bytes of a call, calls.
    told: dict[str, Any] = field(init=False, factory=dict)

    @hookimpl
    def prepare_module(self, module: torch.nn.Module) -> None:
        """Leave the module its values."""

    def _begin(self) -> None:
        if self.run is not None:
            return
        wait = Work.wait

        def waited(*arguments: Any) -> Any:
            with self.counter.quiet():  # gloo reduces and scatters a copy of its own
                return wait(*arguments)

        gloo, resizes = replaced(Work, "wait", waited), counting_resizes(self.counter)
        for context in (gloo, resizes, quiet_shapes(self.counter), self.counter):
            self._modes.enter_context(context)

    def _end_step(self) -> None:
        self.ends.append(+self.counter.now)
        if len(self.ends) < self.num_steps:
            self._forget()
            return
        self._modes.close()
        peak = self.counter.peak
        self.told = {
            "peak": peak.total, "at_peak": peak.by, "phase": peak.phase, "end": self.ends[-1],
            "flops": self.counter.flops,
            "sent": [[*key, calls] for key, calls in sorted(self.counter.sent.items())],
        }  # fmt: skip
        if self.folder is not None:
            (self.folder / f"counted-{self.run.rank}.json").write_text(json.dumps(self.told))
