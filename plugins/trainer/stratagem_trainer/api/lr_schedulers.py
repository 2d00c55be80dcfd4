"""A learning rate scheduler and when it steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from attrs import define, field
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_trainer.api.monitored import HasMetrics, monitored
from stratagem_trainer.api.published import as_shown


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

    def parts(self) -> list[Any]:
        """Return the scheduler, and those that it consists of, as torch's SequentialLR and ChainedScheduler do."""
        found = [self.scheduler]
        for each in found:
            found += getattr(each, "_schedulers", ())
        return found

    def step(self, trainer: HasMetrics) -> None:
        """Step the scheduler, with its metric if it watches one. Collective then.

        Raises:
            ConfigError: nobody logged the metric, or ranks logged different values.
        """
        later = ', or set "strict": False to skip steps before it is there, such as those before the first validation'
        value = monitored(trainer, "lr_scheduler", str(self.monitor), self.strict, later) if self.plateau else None
        if self.plateau and value is None:
            return
        if self.custom_step is not None:
            self.custom_step(self.scheduler, as_shown(value))
        elif self.plateau:
            self.scheduler.step(value)
        else:
            self.scheduler.step()
