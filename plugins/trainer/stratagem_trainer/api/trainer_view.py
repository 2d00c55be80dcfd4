"""Protocol for the argument `trainer` of hooks: the attributes that a plugin may use.

`stratagem.Trainer` has more attributes, which are for the script that made it, or private.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem.api.context import Position, RunContext
    from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig
    from stratagem_trainer.api.metric_values import ReduceFx
    from stratagem_trainer.api.published import Published


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


class TrainerView(Protocol):
    """The trainer, as event hooks of callbacks and loggers see it."""

    @property
    def run(self) -> RunContext:
        """The run: its processes, collectives, plugins."""

    #: The module being trained or evaluated.
    module: Any
    #: The data module of this call, or None.
    datamodule: Any
    #: Every metric that was published; what decides by one reads `published.exact`.
    published: Published
    #: The same as float32 tensors, by name.
    callback_metrics: dict[str, Any]
    #: Every metric that was sent to the loggers, as a float32 tensor, by name.
    logged_metrics: dict[str, Any]
    #: Set to True to end training after the current batch, once `min_epochs` and `min_steps` are reached.
    should_stop: bool
    #: How the fit ended, or is about to.
    outcome: FitOutcome
    #: True during `fit`, False during a validation or test that the user called.
    fitting: bool
    #: True during the sanity check: some batches of validation before training.
    sanity_checking: bool
    #: Samples in a batch of one process; None if the loader has no batch size.
    batch_size: int | None
    #: Batches of a training epoch; inf if the loader has no length.
    num_training_batches: float
    #: Batches of each validation loader.
    num_val_batches: list[float]
    #: Batches of each test loader.
    num_test_batches: list[float]
    #: Batches of each loader to predict on.
    num_predict_batches: list[float]
    #: The epoch after which training ends; -1 means no limit.
    max_epochs: int
    #: The optimizer step after which training ends; -1 means no limit.
    max_steps: int

    @property
    def state(self) -> TrainerState:
        """Which call is under way or was the last one, and how it stands."""

    @property
    def training(self) -> bool:
        """Whether batches of training are being trained on."""

    @property
    def validating(self) -> bool:
        """Whether a validation is under way, other than the sanity check."""

    @property
    def testing(self) -> bool:
        """Whether a test is under way."""

    @property
    def predicting(self) -> bool:
        """Whether a prediction is under way."""

    @property
    def evaluating(self) -> bool:
        """Whether a validation, the sanity check or a test is under way."""

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit, for schedules: ``configure_optimizers`` may use it. inf without a limit.

        Reading it there makes the loaders, which is collective: all ranks read it.

        Raises:
            ConfigError: read before a fit has started.
        """

    def stop(self, reason: str) -> None:
        """End training like ``should_stop = True``; the fit's last lines give `reason`, the first one if several do."""

    @property
    def settings(self) -> Any:
        """The arguments of the trainer, as attributes."""

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""

    @property
    def current_epoch(self) -> int:
        """The epoch being trained, from 0."""

    @property
    def position(self) -> Position:
        """Progress of training."""

    @property
    def world_size(self) -> int:
        """Number of processes over all nodes."""

    @property
    def global_rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, from 0."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has rank 0."""

    @property
    def default_root_dir(self) -> str:
        """The folder of logs and checkpoints."""

    @property
    def fast_dev_run(self) -> bool:
        """Whether the run only tries a few batches, and writes no files."""

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks, in the order in which they are called."""

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that keeps checkpoints, or None."""

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback that stops training early, or None."""

    @property
    def log_dir(self) -> str:
        """The folder that the first logger writes to, once rank 0 has written something; else `default_root_dir`."""

    @property
    def num_nodes(self) -> int:
        """Number of machines."""

    @property
    def loggers(self) -> list[Any]:
        """The loggers."""

    @property
    def logger(self) -> Any:
        """The first logger, or None."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that the module made."""

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The learning rate schedulers, and when they step."""

    @property
    def at_step_boundary(self) -> bool:
        """Whether the last batch ended with an optimizer step, so that no gradients are being accumulated."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches for each optimizer step, in the present epoch."""

    def schedule_accumulation(self, schedule: dict[int, int]) -> None:
        """Set the number of batches to accumulate, by the first epoch to which it applies; from the next epoch on.

        Raises:
            ConfigError: epoch 0 is missing, or the strategy cannot accumulate.
        """

    @property
    def effective_batch_size(self) -> int | None:
        """Samples of an optimizer step, over all processes; None if the loader has no batch size."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What a progress bar shows now: the loss, and what was logged with ``prog_bar=True``. Waits for the device."""

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, trainable_only: bool = False) -> None:
        """Write to `filepath` what resuming needs, or with `weights_only` what predicting needs. All ranks call it.

        With `trainable_only` frozen parameters are left out.
        """

    def log_metric(
        self,
        name: str,
        value: Tensor | float,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: ReduceFx = "mean",
        sync_dist: bool = False,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        add_dataloader_idx: bool = True,
    ) -> None:
        """Log a metric, as `Module.log` does: ``trainer.log_metric("loss", loss, prog_bar=True)``."""

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 only."""

    def leave_after_batch(self, action: Callable[[], Any]) -> None:
        """Call `action` once, after `on_train_batch_end` of all callbacks; it may raise an error to end training."""

    def train_in_parts(self, train: Callable[[Any, int, float, bool], Any]) -> PartSteps:
        """Have the rest of this fit train each batch by ``train(batch, batch_idx, divisor, sync)``.

        It trains all samples of `batch`, part by part with what this method returns, and returns what `training_step`
        would return for the batch. The loss of the batch is divided by `divisor`; `sync` says that the batch ends its
        accumulation window.
        """

    def configure_again(self, loader: Any = None) -> None:
        """Call `configure_optimizers` again, while a fit starts: it may read what a callback has changed. Collective.

        Optimizers stay. At step 0 they get the options of parameter groups of those that it returns now, and its
        schedules begin; in a resumed run schedules continue from the checkpoint.

        Args:
            loader: train with it from now on; it yields this rank's part of the data.
        """

    @property
    def train_dataloader(self) -> Any:
        """The training loader, which yields this rank's part of the data; None before a fit."""

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or the list of them, which yield this rank's part of the data; None without any."""

    @property
    def test_dataloaders(self) -> Any:
        """The loader, or the list of them, of `test`; None before one."""

    @property
    def predict_dataloaders(self) -> Any:
        """The loader, or the list of them, of `predict`; None before one."""

    def trial_steps(self, who: str) -> AbstractContextManager[Callable[[Any, int], Tensor]]:
        """Run training steps and undo them afterwards.

        ``with trainer.trial_steps("my callback") as step: loss = step(batch, number)``. Afterwards weights, optimizer,
        precision, random numbers and metrics are as before.
        """

    def accepts(self, **arguments: Any) -> bool:
        """Whether this model could be trained with these `arguments` in place of the trainer's own.

        As far as that is known before processes start: plugins, options and capabilities fit.
        """
