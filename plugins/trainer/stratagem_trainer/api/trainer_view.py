"""Protocol for the argument `trainer` of hooks: the attributes that a plugin may use.

`stratagem.Trainer` has more attributes, which are for the user (`stratagem_trainer.api.user_view`), or private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem.api.context import RunContext
    from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig
    from stratagem_trainer.api.metric_values import ReduceFx
    from stratagem_trainer.api.published import Published
    from stratagem_trainer.api.trainer_parts import FitOutcome, PartSteps, TrainerState


class Position(Protocol):
    """Progress of training: the epoch, optimizer steps and batches so far. Callbacks set none of it."""

    epoch: int
    #: Optimizer steps so far, including those that a loss scale skipped.
    global_step: int
    #: Finished batches of the current epoch.
    batches_done: int
    #: Whether the current epoch ran all its batches.
    epoch_done: bool
    #: Whether `on_train_epoch_end` was called after all batches of the current epoch.
    epoch_ended: bool
    #: Optimizer steps that a loss scale skipped.
    skipped_steps: int


class TrainerView(Protocol):
    """The trainer, as event hooks of callbacks and loggers see it."""

    #: The arguments of the trainer, as attributes.
    settings: Any
    #: The module being trained or evaluated.
    module: Any
    #: Every metric that was published; what decides by one reads `published.exact`.
    published: Published
    #: The same as float32 tensors, by name.
    callback_metrics: dict[str, Any]
    #: Set to True to end training after the current batch, once `min_epochs` and `min_steps` are reached.
    should_stop: bool
    #: Progress of training.
    position: Position
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
    def run(self) -> RunContext:
        """The run: its processes, collectives, plugins."""

    @property
    def state(self) -> TrainerState:
        """Which call is under way or was the last one, and how it stands."""

    @property
    def validating(self) -> bool:
        """Whether a validation is under way, other than the sanity check."""

    def stop(self, reason: str) -> None:
        """End training like ``should_stop = True``; the fit's last lines give `reason`, the first one if several do."""

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""

    @property
    def current_epoch(self) -> int:
        """The epoch being trained, from 0."""

    @property
    def world_size(self) -> int:
        """Number of processes over all nodes."""

    @property
    def global_rank(self) -> int:
        """This process's rank, from 0."""

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
    def loggers(self) -> list[Any]:
        """The loggers."""

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

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, trainable_only: bool = False) -> None:
        """Write to `filepath` what resuming needs, or with `weights_only` what predicting needs. All ranks call it.

        With `trainable_only` frozen parameters are left out.
        """

    def log_metric(
        self, name: str, value: Tensor | float, *, prog_bar: bool = False, logger: bool = True,
        on_step: bool | None = None, on_epoch: bool | None = None, reduce_fx: ReduceFx = "mean",
        sync_dist: bool = False, batch_size: int | None = None, rank_zero_only: bool = False,
        add_dataloader_idx: bool = True,
    ) -> None:  # fmt: skip
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

    def trial_steps(self, who: str) -> AbstractContextManager[Callable[[Any, int], Tensor]]:
        """Run training steps and undo them afterwards.

        ``with trainer.trial_steps("my callback") as step: loss = step(batch, number)``. Afterwards weights, optimizer,
        precision, random numbers and metrics are as before.
        """

    def accepts(self, **arguments: Any) -> bool:
        """Whether this model could be trained with these `arguments` in place of the trainer's own.

        As far as that is known before processes start: plugins, options and capabilities fit.
        """
