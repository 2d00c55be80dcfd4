"""Stop training after a given time, and measure the time of each stage."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem_trainer.api import Callback
from stratagem_trainer.api.validators import read_duration

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class Timer(Callback):
    """End training on all ranks when one has trained for `duration`; the time before a resume counts, too."""

    positional: ClassVar[tuple[str, ...]] = ("duration", "interval")

    #: Seconds, a timedelta or its arguments (``{"minutes": 5}``), or "DD:HH:MM:SS"; None only measures.
    duration: timedelta | dict[str, float] | str | float | None = None
    #: Check the time after each step or each epoch; each check is a collective.
    interval: Literal["step", "epoch"] = "step"
    #: Print when the time is over, on rank 0.
    verbose: bool = True

    _limit: float | None = field(init=False, default=None)
    _earlier: dict[str, float] = field(init=False, factory=dict)
    _began: dict[str, float] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        limit = read_duration(self.duration, "timer.duration")
        self._limit = None if limit is None else limit.total_seconds()

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in the stage "train", "validate" or "test"."""
        now = time.monotonic()
        return self._earlier.get(stage, 0.0) + (now - self._began[stage] if stage in self._began else 0.0)

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds left to train, or to spend in `stage`; None without a limit."""
        return None if self._limit is None else max(0.0, self._limit - self.time_elapsed(stage))

    @hookimpl
    def on_train_start(self) -> None:
        self._begin("train")

    @hookimpl
    def on_train_end(self) -> None:
        self._end("train")

    @hookimpl
    def on_validation_start(self) -> None:
        self._begin("validate")

    @hookimpl
    def on_validation_end(self) -> None:
        self._end("validate")

    @hookimpl
    def on_test_start(self) -> None:
        self._begin("test")

    @hookimpl
    def on_test_end(self) -> None:
        self._end("test")

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self.interval == "step":
            self._check(trainer)

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if self.interval == "epoch":
            self._check(trainer)

    def _begin(self, stage: str) -> None:
        self._began[stage] = time.monotonic()

    def _end(self, stage: str) -> None:
        if stage in self._began:
            elapsed = self.time_elapsed(stage)
            del self._began[stage]
            self._earlier[stage] = elapsed

    def _check(self, trainer: TrainerView) -> None:
        if self._limit is None or not trainer.run.collectives.any(self.time_elapsed() >= self._limit):
            return
        if self.verbose and not trainer.should_stop:
            trainer.print(f"timer: training stops after {self.time_elapsed():.0f} s, as timer.duration says")
        trainer.stop(f"timer: {self.time_elapsed():.0f} s have passed, and timer.duration is {self._limit:g} s")

    def state_dict(self) -> dict[str, float]:
        """Return the seconds spent in each stage."""
        return {stage: self.time_elapsed(stage) for stage in ("train", "validate", "test")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the seconds of an earlier run."""
        self._earlier = dict(state)
