"""`FitState`: what the loops of one trainer share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field, fields

from stratagem_trainer.api import FitOutcome
from stratagem_trainer.api.published import Published
from stratagem_trainer.metrics import StageMetrics
from stratagem_trainer.progress import Position

if TYPE_CHECKING:
    from stratagem.runtime.context import Context
    from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig
    from stratagem_trainer.api.user_view import UserView
    from stratagem_trainer.batches import ResumableBatches
    from stratagem_trainer.settings import TrainerSettings


#: How long a rank that calls a collective operation of the trainer waits for the others before it reports that it is
#: alone.
BARRIER_TIMEOUT_S = 60.0

#: Declares a field that begins with its default in every process, and is not sent to another one.
_OF_THIS_PROCESS: Final = {"of_this_process": True}


@define(eq=False, repr=False, slots=False)
class FitState:
    """How far training has come, what it works on, and what was logged.

    A launcher's worker gets a copy, without the fields that are declared `_OF_THIS_PROCESS`.
    """

    run: Context
    settings: TrainerSettings
    #: What hooks get as `trainer`.
    trainer: UserView = field(repr=False)
    max_time: timedelta | None
    #: Over how many batches gradients accumulate, by the epoch from which on.
    accumulation: dict[int, int]
    module: Any = None
    datamodule: Any = None
    #: The call that is under way, or the last one: "fit", "validate", "test" or "predict".
    fn: str | None = None
    #: "initializing", "running", "finished" or "interrupted".
    status: str = "initializing"
    ckpt_path: str | Path | None = None
    should_stop: bool = False
    #: How the fit ended, or is about to.
    outcome: FitOutcome = field(factory=FitOutcome)
    #: Training is under way in this process, rather than a validation or test that the user called.
    fitting: bool = False
    sanity_checking: bool = False
    #: Samples in a batch of one process; None if the training loader has no batch size.
    batch_size: int | None = None
    num_training_batches: float = 0
    #: Batches of each loader, as far as they are known and not limited; inf otherwise.
    num_val_batches: list[float] = field(factory=list)
    num_test_batches: list[float] = field(factory=list)
    num_predict_batches: list[float] = field(factory=list)
    batches_between_validations: float = math.inf
    #: The last batch of this epoch has begun; `position` counts it when its step is done.
    trains_last_batch: bool = False
    #: Every metric that was published; those that loggers got.
    published: Published = field(factory=Published)
    logged: Published = field(factory=Published)
    #: Optimizer and scheduler states, and more, that a worker sent back.
    worker_state: dict[str, Any] | None = None

    #: The metrics of the training epoch, and those of the stage that is under way.
    train_metrics: StageMetrics = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    stage_metrics: StageMetrics = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    #: What callbacks logged in `on_train_epoch_end`, while that is called; for the loggers.
    late_metrics: dict[str, Any] | None = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    last_logged_step: int = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=-1)
    #: The latest epoch that was trained, and what loggers get of its last step.
    last_step: tuple[int, dict[str, Any]] = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=(0, {}))
    events: Any = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    #: The batches of the training loop.
    train_batches: ResumableBatches | None = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    #: What `training_step` returned last.
    last_outputs: Any = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    #: Whether optimizers that have `train()` and `eval()` are in "train" or "eval" mode.
    optimizer_mode: str = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default="eval")
    #: Number of the loader whose batches are used now.
    dataloader_idx: int = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=0)
    #: Called once after the current batch, when all callbacks have seen its end; they raise to end training. Threads
    #: append to it, too.
    on_leaving: deque[Callable[[], Any]] = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, factory=deque)
    #: The loaders of each stage, which yield this rank's part of the data.
    loaders: dict[str, list[Any]] = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, factory=dict)
    #: Makes the loaders of a fit, if they are not made yet.
    make_loaders: Callable[[], Any] | None = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)
    #: See `TrainerView.configure_again`.
    configure_again: Any = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)

    #: Trains a batch in place of the run's `train_step`: see `TrainerView.train_in_parts`.
    train_batch: Callable[[Any, int, float, bool], Any] | None = field(
        init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None
    )

    #: What `Module.optimizers` returned.
    handles: list[Any] = field(init=False, repr=False, metadata=_OF_THIS_PROCESS, default=None)

    @property
    def position(self) -> Position:
        position: Position = self.run.progress
        return position

    @position.setter
    def position(self, position: Position) -> None:
        self.run.progress = position

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.run.lr_scheduler_configs

    @property
    def accumulate_grad_batches(self) -> int:
        """Over how many batches gradients accumulate in the current epoch."""
        return self.accumulation_in(self.position.epoch)

    def accumulation_in(self, epoch: int) -> int:
        """Return over how many batches gradients accumulate in `epoch`."""
        return next(n for begin, n in reversed(self.accumulation.items()) if begin <= epoch)

    @property
    def validates_in_time(self) -> bool:
        """Whether a time lies between two validations, rather than a number of batches."""
        settings = self.settings
        return not isinstance(settings.val_check_interval, int | float) and not settings.fast_dev_run

    @property
    def sums_losses(self) -> bool:
        """Whether a ``"count"`` beside a loss makes it a sum, which the loop divides; see `token_loss`."""
        return not self.run.manual and "loss_normalization" not in self.settings.origins

    @property
    def at_step_boundary(self) -> bool:
        """Whether the last batch ended with an optimizer step, so that no gradients are being accumulated."""
        return self.train_batches is None or not self.train_batches.window_is_open

    def begin(self, events: Any) -> None:
        """Begin a call in this process; `events` is an `Events` of this state."""
        self.forget_metrics()
        self.train_metrics = self.stage_metrics = StageMetrics(True, self.run.readers)
        self.stage_metrics.closed = "outside training, validation and testing"
        self.late_metrics, self.last_logged_step, self.events, self.handles = None, -1, events, []

    def forget_metrics(self) -> None:
        """Forget every metric that was published."""
        self.published, self.logged = Published(), Published()

    def leave_if_asked(self) -> None:
        """Call the actions of `on_leaving` that callbacks have added; one that is added meanwhile waits for a batch."""
        for _ in range(len(self.on_leaving)):
            self.on_leaving.popleft()()

    def __getstate__(self) -> dict[str, Any]:
        sent = [each.name for each in fields(type(self)) if "of_this_process" not in each.metadata]
        return {name: getattr(self, name) for name in sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for each in fields(type(self)):
            if "of_this_process" in each.metadata:
                default: Any = each.default
                setattr(self, each.name, default.factory() if hasattr(default, "factory") else default)
