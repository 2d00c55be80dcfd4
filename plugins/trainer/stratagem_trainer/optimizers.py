"""Read what `configure_optimizers` returned: optimizers, schedulers, and when each scheduler steps."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from stratagem.api.options import structure
from stratagem.errors import ConfigError
from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig

_FORMS = "an optimizer, a list of them, ([optimizers], [schedulers]), or a dict with 'optimizer' and 'lr_scheduler'"


def read(configured: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and scheduler configurations in `configured`, in any of the usual forms.

    Raises:
        ConfigError: none of those forms.
    """
    if configured is None:
        return [], []
    if isinstance(configured, tuple) and len(configured) == 2 and all(isinstance(p, list | tuple) for p in configured):
        optimizers, schedulers = configured
        return _optimizers(optimizers), [_scheduler(each) for each in schedulers]
    items = configured if isinstance(configured, list | tuple) else [configured]
    optimizers, schedulers = [], []
    for item in items:
        if isinstance(item, dict):
            unknown = set(item) - {"optimizer", "lr_scheduler", "monitor"}
            if "optimizer" not in item or unknown:
                raise ConfigError(f"configure_optimizers returned a dict with {sorted(item)}", expected=_FORMS)
            optimizers.append(item["optimizer"])
            if item.get("lr_scheduler") is not None:
                schedulers.append(_scheduler(item["lr_scheduler"], item.get("monitor")))
        else:
            optimizers.append(item)
    return _optimizers(optimizers), schedulers


def _optimizers(values: Any) -> list[Optimizer]:
    for value in values:
        # An engine's optimizer may only look like torch's.
        if not (isinstance(value, Optimizer) or (hasattr(value, "param_groups") and hasattr(value, "step"))):
            raise ConfigError(f"configure_optimizers returned a {type(value).__name__}", expected=_FORMS)
    return list(values)


def _scheduler(value: Any, monitor: str | None = None) -> LRSchedulerConfig:
    config = value if isinstance(value, dict) else {"scheduler": value}
    config = config if monitor is None else {"monitor": monitor} | config
    if not hasattr(config.get("scheduler"), "step"):
        raise ConfigError(f"lr_scheduler is {value!r}", expected="a scheduler, or a dict with one under 'scheduler'")
    return structure(LRSchedulerConfig, config, "lr_scheduler")
