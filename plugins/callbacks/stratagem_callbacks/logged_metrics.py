"""What callbacks that log numbers of their own share: the check for a logger, and logging them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


def check_has_logger(trainer: TrainerView, callback: str) -> None:
    """Refuse a run without a logger, in which the callback of this name has no effect."""
    if not (trainer.loggers or trainer.fast_dev_run):
        raise ConfigError(
            f"{callback} has no logger to log to", expected="a logger", do="drop logger=False, or the callback"
        )


def log(trainer: TrainerView, metrics: dict[str, float], step: int) -> None:
    """Log `metrics` of `step` on rank 0, and add them to ``callback_metrics`` on all ranks."""
    trainer.callback_metrics.update(metrics)
    if trainer.is_global_zero:
        trainer.run.log_metrics(metrics, step)
