"""How fast a fit is, and how long it still takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@frozen
class Progress:
    """How far an epoch, or an evaluation, is."""

    title: str
    #: Batches done, and the number at the end; inf if that is not known.
    done: int
    total: float
    #: Batches per second of training.
    rate: float
    #: Seconds to the end of the epoch; None if not known.
    seconds_left: float | None
    #: The part of the run that is done, and seconds to its end; None if not known.
    share_of_run: float | None = None
    run_seconds_left: float | None = None
    #: Whether the run ends with this epoch, so that both take as long.
    ends_run: bool = False


@define(eq=False)
class Pace:
    """Measures training: batches per second of each epoch without its validations, and of the fit with them."""

    clock: Callable[[], float] = time.perf_counter
    _began: float = field(init=False, default=0.0)
    _first: int = field(init=False, default=0)
    _paused: float = field(init=False, default=0.0)
    _paused_at: float | None = field(init=False, default=None)
    #: Batches per second of the epoch before.
    _earlier_rate: float = field(init=False, default=0.0)
    _rate: float = field(init=False, default=0.0)
    _fit_began: float = field(init=False, default=0.0)
    #: Batches of this fit in the epochs before, and in this one.
    _before: int = field(init=False, default=0)
    _here: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._fit_began = self.clock()

    def start_epoch(self, done: int) -> None:
        """Begin an epoch of which `done` batches were trained by an earlier fit."""
        self._earlier_rate = self._rate or self._earlier_rate
        self._rate, self._began, self._first = 0.0, self.clock(), done
        self._before, self._here = self._before + self._here, 0
        self._paused, self._paused_at = 0.0, None

    def has_trained(self, done: int) -> bool:
        """Whether this fit has trained some of the `done` batches of the epoch."""
        return done > self._first

    def pause(self) -> None:
        """Stop the clock of the epoch: a validation begins."""
        self._paused_at = self.clock()

    def go_on(self) -> None:
        """Start the clock of the epoch again."""
        if self._paused_at is not None:
            self._paused += self.clock() - self._paused_at
            self._paused_at = None

    def progress(self, title: str, done: int, in_epoch: float, in_run: float) -> Progress:
        """Return how far the fit is, with `in_epoch` and `in_run` batches left."""
        now = self.clock()
        seconds = (now if self._paused_at is None else self._paused_at) - self._began - self._paused
        self._here = done - self._first
        self._rate = self._here / seconds if seconds > 0 else 0.0
        rate = self._rate or self._earlier_rate
        trained = self._before + self._here
        return Progress(
            title, done, done + in_epoch, rate,
            in_epoch / rate if rate and math.isfinite(in_epoch) else None,
            *self._of_run(trained, in_run, now - self._fit_began), ends_run=in_run <= in_epoch < math.inf,
        )  # fmt: skip

    def _of_run(self, trained: int, left: float, seconds: float) -> tuple[float | None, float | None]:
        if math.isinf(left):
            return None, None
        share = trained / (trained + left) if trained + left else 1.0
        return share, seconds / trained * left if trained else None


def batches_left(trainer: TrainerView, done: int) -> tuple[float, float]:
    """Return the batches to the end of the epoch, and of the run; inf if not known."""
    size, by_steps = trainer.num_training_batches, math.inf
    if trainer.max_steps >= 0:
        by_steps = max(0, trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    by_epochs = math.inf
    if trainer.max_epochs >= 0 and math.isfinite(size):
        by_epochs = max(0, trainer.max_epochs - trainer.current_epoch) * size - done
    return min(max(0, size - done), by_steps), max(0, min(by_epochs, by_steps))
