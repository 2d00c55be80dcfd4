"""Stop training when a metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, not_empty
from stratagem_callbacks.decisions import acts_after_epoch
from stratagem_trainer.api import Callback
from stratagem_trainer.api.monitored import monitored
from stratagem_trainer.api.published import shown

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class EarlyStopping(Callback):
    """End training when `monitor` has not improved for `patience` checks; on all ranks after the same step.

    The metric must be equal on all ranks: log it with ``sync_dist=True``.
    """

    positional: ClassVar[tuple[str, ...]] = ("monitor", "min_delta", "patience", "verbose", "mode")
    roles: ClassVar[frozenset[str]] = frozenset({"early-stopping"})

    #: Name of the metric.
    monitor: str = field(validator=not_empty)
    #: Minimum change that counts as an improvement, in units of the metric.
    min_delta: float = field(default=0.0, converter=abs)
    #: Checks without improvement before training ends.
    patience: int = field(default=3, validator=at_least(0))
    #: "min" if smaller values are better, "max" if larger ones are.
    mode: Literal["min", "max"] = "min"
    #: Raise an error if the metric was not logged; otherwise skip the check.
    strict: bool = True
    #: End training when the metric is NaN or infinite.
    check_finite: bool = True
    #: End training when the metric is at least this good.
    stopping_threshold: float | None = None
    #: End training when the metric is worse than this.
    divergence_threshold: float | None = None
    #: Check at the end of the training epoch rather than after validation. By default at the end of the epoch, unless
    #: `val_check_interval` or `check_val_every_n_epoch` validate at other times than once an epoch.
    check_on_train_epoch_end: bool | None = None
    #: Print why training ends, on rank 0.
    verbose: bool = False

    #: Checks since the last improvement.
    wait_count: int = field(init=False, default=0)
    #: Epoch in which training ended; 0 if it has not.
    stopped_epoch: int = field(init=False, default=0)
    _best_score: float | None = field(init=False, default=None)
    best_score = shown("_best_score", "Best value so far: a float32 tensor; None before the first check.")
    #: Why training ended; "" if it has not.
    stopping_reason: str = field(init=False, default="")

    @hookimpl
    def on_validation_end(self, trainer: TrainerView) -> None:
        if trainer.fitting and not acts_after_epoch(trainer, self.check_on_train_epoch_end):
            self._check(trainer, ", or set check_on_train_epoch_end=True if the end of the epoch logs it")

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if acts_after_epoch(trainer, self.check_on_train_epoch_end) and trainer.position.epoch_ended:
            self._check(trainer)  # an epoch that was cut short is checked when it is complete

    def _check(self, trainer: TrainerView, do: str = "") -> None:
        if trainer.fast_dev_run:
            return
        value = monitored(trainer, "early_stopping", self.monitor, self.strict, do)
        if value is None:
            return
        reason = self._reason(value)
        if reason:
            self.stopping_reason, self.stopped_epoch = reason, trainer.current_epoch
            trainer.stop(f"early_stopping: {reason}")
            if self.verbose:
                trainer.print(f"early stopping: {reason}")

    def _reason(self, value: float) -> str:
        """Record `value`; return why to stop, or an empty string."""
        name = self.monitor
        if self.check_finite and not math.isfinite(value):
            return f"{name} is {value}"
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return f"{name} is {value:.6g}, past the threshold of {self.stopping_threshold:g}"
        if self.divergence_threshold is not None and self._better(self.divergence_threshold, value):
            return f"{name} is {value:.6g}, worse than {self.divergence_threshold:g}"
        margin = self.min_delta if self.mode == "max" else -self.min_delta
        if self._best_score is None or self._better(value, self._best_score + margin):
            self._best_score, self.wait_count = value, 0
            return ""
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return f"{name} has not improved on {self._best_score:.6g} in {self.wait_count} checks"
        return ""

    def _better(self, value: float, other: float) -> bool:
        return value > other if self.mode == "max" else value < other

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of checks since."""
        names = ("wait_count", "stopped_epoch", "_best_score", "stopping_reason")
        return {name.lstrip("_"): getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value, and the number of checks since."""
        if not isinstance(state.get("best_score"), int | float | None):
            raise TypeError(f"best_score is a {type(state['best_score']).__name__}, not a number")
        self._best_score, self.wait_count = state["best_score"], state["wait_count"]
        self.stopped_epoch, self.stopping_reason = state["stopped_epoch"], state["stopping_reason"]
