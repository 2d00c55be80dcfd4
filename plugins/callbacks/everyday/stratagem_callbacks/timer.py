"""Stop training after a time, and tell how long it took."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from attrs import define, field

from stratagem.api import Callback, hookimpl
from stratagem.api.validators import read_duration

if TYPE_CHECKING:
    from stratagem.api import TrainerView


@define(eq=False, kw_only=True)
class Timer(Callback):
    """Ends training on all ranks once one of them has trained for `duration`; time before a resume counts."""

    #: Seconds, a timedelta, or "DD:HH:MM:SS"; without it time is only measured.
    duration: timedelta | str | float | None = None
    #: Look at the clock after every step or every epoch; ranks ask each other each time.
    interval: Literal["step", "epoch"] = "step"
    #: Say so when the time is up, on rank 0.
    verbose: bool = True

    _limit: float | None = field(init=False, default=None)
    _earlier: dict[str, float] = field(init=False, factory=dict)
    _began: dict[str, float] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        limit = read_duration(self.duration, "timer.duration")
        self._limit = None if limit is None else limit.total_seconds()

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in "train", "validate" or "test" so far."""
        now = time.monotonic()
        return self._earlier.get(stage, 0.0) + (now - self._began[stage] if stage in self._began else 0.0)

    def time_remaining(self) -> float | None:
        """Return the seconds left to train; None without a limit."""
        return None if self._limit is None else max(0.0, self._limit - self.time_elapsed())

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
            trainer.print(f"timer: {self.time_elapsed():.0f} s of training are over, as timer.duration says")
        trainer.should_stop = True

    def state_dict(self) -> dict[str, float]:
        """Return the seconds spent in each stage."""
        return {stage: self.time_elapsed(stage) for stage in ("train", "validate", "test")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Count what an earlier run spent."""
        self._earlier = dict(state)
