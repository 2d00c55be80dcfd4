"""Protocol for `self.trainer` of a module: what a user reads of a trainer beside `TrainerView`.

Callbacks get the same object, and no callback of this library uses these names.
"""

from __future__ import annotations

from typing import Any, Protocol

from stratagem_trainer.api.trainer_view import TrainerView


class UserView(TrainerView, Protocol):
    """The trainer, as a user's module and script see it."""

    #: The data module of this call, or None.
    datamodule: Any
    #: Every metric that was sent to the loggers, as a float32 tensor, by name.
    logged_metrics: dict[str, Any]

    @property
    def training(self) -> bool:
        """Whether batches of training are being trained on."""

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

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, from 0."""

    @property
    def num_nodes(self) -> int:
        """Number of machines."""

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback that stops training early, or None."""

    @property
    def log_dir(self) -> str:
        """The folder that the first logger writes to, once rank 0 has written something; else `default_root_dir`."""

    @property
    def logger(self) -> Any:
        """The first logger, or None."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What a progress bar shows now: the loss, and what was logged with ``prog_bar=True``. Waits for the device."""

    @property
    def test_dataloaders(self) -> Any:
        """The loader, or the list of them, of `test`; None before one."""

    @property
    def predict_dataloaders(self) -> Any:
        """The loader, or the list of them, of `predict`; None before one."""
