"""Detect losses that jump, or that are NaN or infinite."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, more_than
from stratagem.errors import StratagemError
from stratagem_trainer.api import Callback, mean_loss

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


class TrainingSpike(StratagemError):
    """Raised when the loss jumps, or is not finite."""


@define(eq=False, kw_only=True)
class SpikeDetection(Callback):
    """Compare the loss of each batch, averaged over ranks, with its running mean; reads the loss in each step."""

    #: A loss this many times the running mean (or that mean plus `atol`, whichever is more) is a spike.
    rtol: float = field(default=5.0, validator=more_than(1))
    #: Minimum distance of a spike from the running mean, in units of the loss.
    atol: float = field(default=0.0, validator=at_least(0))
    #: Number of first batches in which only a loss that is not finite is a spike.
    warmup: int = field(default=100, validator=at_least(1))
    #: Weight of earlier losses in the running mean.
    momentum: float = field(default=0.95, validator=more_than(0))
    #: Raise an error, stop training normally, or only warn.
    on_spike: Literal["error", "stop", "warn"] = "error"

    #: ``(epoch, batch, loss)`` of each spike.
    spikes: list[tuple[int, int, float]] = field(init=False, factory=list)
    _mean: float | None = field(init=False, default=None)
    _seen: int = field(init=False, default=0)

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, outputs: Any, batch_idx: int) -> None:
        loss = mean_loss(outputs)
        if loss is None:
            return
        value = float(trainer.run.collectives.all_reduce(loss.float().clone(), "mean"))
        if self._is_spike(value):
            self.spikes.append((trainer.current_epoch, batch_idx, value))
            self._report(trainer, batch_idx, value)
            return
        self._seen += 1
        self._mean = value if self._mean is None else self.momentum * self._mean + (1 - self.momentum) * value

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        if self._mean is None or self._seen < self.warmup:
            return False
        return value > max(self._mean * self.rtol if self._mean > 0 else self._mean, self._mean + self.atol)

    def _report(self, trainer: TrainerView, batch_idx: int, value: float) -> None:
        mean = "no earlier loss" if self._mean is None else f"a running mean of {self._mean:.6g}"
        found = f"the loss is {value:.6g} in batch {batch_idx} of epoch {trainer.current_epoch}, after {mean}"
        if self.on_spike == "error":
            raise TrainingSpike(
                found, expected="a decreasing loss", do="check that batch, lower the learning rate, or clip gradients"
            )
        if trainer.is_global_zero:
            warnings.warn(found, stacklevel=2)
        if self.on_spike == "stop":
            trainer.stop(f"spike_detection: {found}")

    def state_dict(self) -> dict[str, Any]:
        """Return the running mean, and the spikes."""
        return {"mean": self._mean, "seen": self._seen, "spikes": list(self.spikes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running mean, and the spikes."""
        self._mean, self._seen, self.spikes = state["mean"], state["seen"], [tuple(s) for s in state["spikes"]]
