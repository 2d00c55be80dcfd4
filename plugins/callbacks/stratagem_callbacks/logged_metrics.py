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
    trainer.published.update(metrics)
    if trainer.is_global_zero:
        trainer.run.log_metrics(metrics, step)


def is_due(trainer: TrainerView, last_step: int) -> bool:
    """Whether a callback that last logged at `last_step` (-1: not yet) logs now, as the loggers get a step's metrics.

    It does at the first step of a fit, and every `log_every_n_steps`; in `on_train_end` the last step is left.
    """
    step = trainer.global_step
    return step > 0 and step != last_step and (last_step < 0 or step % trainer.settings.log_every_n_steps == 0)
