"""What few callbacks use of a trainer: how a call stands, how a fit ended, and training a batch part by part."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


@frozen
class TrainerState:
    """Which call is under way or was the last one, and how it stands."""

    #: "fit", "validate", "test" or "predict"; None before the first call.
    fn: str | None
    #: "initializing" before the first call, then "running", "finished" or "interrupted" (by an error or a signal).
    status: str
    #: "train", "sanity_check", "validate", "test" or "predict" while a call is under way, otherwise None.
    stage: str | None

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        return self.status in ("finished", "interrupted")


@define(eq=False)
class SavedCheckpoint:
    """A checkpoint that a fit has saved, or is saving in the background."""

    path: Path
    step: int
    #: Whether a fit can continue from it: it holds more than weights.
    resumable: bool
    #: When it was requested: seconds of `time.monotonic`.
    requested_at: float = field(factory=time.monotonic)
    #: Whether all of it is written.
    written: bool = False

    def mark_written(self) -> None:
        """Record that all of it is written."""
        self.written = True


@define(eq=False)
class FitOutcome:
    """How a fit ended or is about to end, and what it can be continued from."""

    #: Why training has ended, or is about to; "" while nothing has asked for it.
    reason: str = ""
    #: The checkpoint that was saved last, or is being saved; None if this model was not saved yet.
    newest_checkpoint: SavedCheckpoint | None = None
    #: What a user writes to continue after an interrupted fit; a program that wraps the trainer sets its own command.
    how_to_resume: str = 'fit(ckpt_path="last")'


class PartSteps(Protocol):
    """Trains the parts of a batch. The gradients of a part are added on this rank, unless the part ends a window."""

    def train(self, part: Any, batch_idx: int, divisor: float, sync: bool) -> Any:
        """Run forward and backward of `part`, its loss divided by `divisor`; return what `training_step` returns.

        With `sync` the strategy completes the gradients of the window; without, it sends nothing in the backward.
        """

    def weight(self, part: Any, samples: int) -> float:
        """Return how much the mean loss of `part` counts: its `samples`, or targets if `loss_normalization` says so."""

    def recorded(self) -> AbstractContextManager[list[tuple[str, Any, dict[str, Any]]]]:
        """Within, what is logged is added to a list of names, values and options, and not published.

        Raises:
            ConfigError: what is logged is an object that computes its value, such as a metric of torchmetrics.
        """

    def publish(self, entries: list[tuple[str, Any, dict[str, Any]]]) -> None:
        """Log `entries` for the present batch."""

    def send_buffers(self) -> None:
        """Call the wrapped model without a computation: it sends now what it sends before a step. Collective."""

    def average_gradients(self) -> None:
        """Complete the gradients that parts without `sync` have added, as a backward with `sync` does. Collective."""
