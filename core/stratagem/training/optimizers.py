"""Read what `configure_optimizers` returned: optimizers, schedulers, and when each scheduler steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stratagem.api.options import structure
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem.training.monitored import monitored

if TYPE_CHECKING:
    from stratagem.training.trainer import Trainer


_FORMS = "an optimizer, a list of them, ([optimizers], [schedulers]), or a dict with 'optimizer' and 'lr_scheduler'"


@define(eq=False, kw_only=True)
class LRSchedulerConfig:
    """A scheduler and when it steps."""

    scheduler: Any
    #: Step after every epoch, or after every optimizer step.
    interval: Literal["epoch", "step"] = "epoch"
    #: Step every so many intervals.
    frequency: int = field(default=1, validator=at_least(1))
    #: Metric that ReduceLROnPlateau watches.
    monitor: str | None = None
    #: A missing metric is an error rather than a skipped step.
    strict: bool = True
    #: Name under which its learning rate is logged.
    name: str | None = None
    #: Scheduler steps on its value, not on time.
    plateau: bool = field(init=False, default=False)
    #: The module's own `lr_scheduler_step`.
    custom_step: Callable[[Any, Any], None] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.plateau and self.monitor is None:
            raise ConfigError(
                "lr_scheduler is a ReduceLROnPlateau without a monitor", expected="the name of a logged metric",
                do='return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}',
            )  # fmt: skip

    def step(self, trainer: Trainer) -> None:
        """Step the scheduler, with its metric if it watches one. Collective then.

        Raises:
            ConfigError: nobody logged the metric, or ranks logged different values.
        """
        value = monitored(trainer, "lr_scheduler", str(self.monitor), self.strict) if self.plateau else None
        if self.plateau and value is None:
            return
        if self.custom_step is not None:
            self.custom_step(self.scheduler, value)
        elif self.plateau:
            self.scheduler.step(value)
        else:
            self.scheduler.step()


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
