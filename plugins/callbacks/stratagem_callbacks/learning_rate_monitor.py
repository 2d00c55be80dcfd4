"""Log learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.errors import ConfigError
from stratagem_callbacks.logged_metrics import check_has_logger, is_due, log
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class LearningRateMonitor(Callback):
    """Log the learning rate of each parameter group as ``lr-<optimizer>`` (``lr-<optimizer>/pg2`` for the second,
    or its own ``name`` instead of ``pg2``).

    It is the rate that the step used, or the one at the epoch's start. A scheduler's own ``name`` replaces
    ``lr-<optimizer>``.
    """

    positional: ClassVar[tuple[str, ...]] = ("logging_interval", "log_momentum")

    #: Log after each step or each epoch; by default as often as the scheduler steps.
    logging_interval: Literal["step", "epoch"] | None = None
    #: Log momentum (or the first beta) too, under ``<name>-momentum``.
    log_momentum: bool = False
    #: Log weight decay too, under ``<name>-weight_decay``.
    log_weight_decay: bool = False

    #: The last values, by name.
    lrs: dict[str, float] = field(init=False, factory=dict)
    #: Those of the step or the epoch that is under way.
    _used: dict[str, float] = field(init=False, factory=dict)
    _last_step: int = field(init=False, default=-1)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        check_has_logger(trainer, "learning_rate_monitor")
        values = list(self._values(trainer))
        self._used, self._last_step = dict(values), -1
        if twice := [name for index, (name, _) in enumerate(values) if name in dict(values[:index])]:
            raise ConfigError(
                f"learning_rate_monitor would log two parameter groups as {twice[0]!r}",
                expected="groups of an optimizer with different names", do="change the name of one, or give it none",
            )  # fmt: skip

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        self._used = dict(self._values(trainer))

    @hookimpl
    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        if self._interval(trainer) == "step":
            self._used = dict(self._values(trainer))

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self._interval(trainer) == "step" and is_due(trainer, self._last_step):
            self._log(trainer)

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        if self._interval(trainer) == "step" and trainer.global_step > self._last_step:
            self._log(trainer)

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if self._interval(trainer) == "epoch":
            self._log(trainer)

    def _interval(self, trainer: TrainerView) -> str:
        if self.logging_interval is not None:
            return self.logging_interval
        return "step" if any(c.interval == "step" for c in trainer.lr_scheduler_configs) else "epoch"

    def _log(self, trainer: TrainerView) -> None:
        self.lrs, self._last_step = self._used, trainer.global_step
        log(trainer, dict(self.lrs), trainer.global_step)

    def _values(self, trainer: TrainerView) -> Any:
        seen: dict[str, int] = {}
        for optimizer in trainer.run.optimizers:
            base = self._name(trainer, optimizer)
            seen[base] = seen.get(base, 0) + 1
            if seen[base] > 1:
                base += f"-{seen[base] - 1}"
            for number, group in enumerate(optimizer.param_groups, 1):
                part = group.get("name") or f"pg{number}"
                name = base if len(optimizer.param_groups) == 1 else f"{base}/{part}"
                yield name, float(group["lr"])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    yield f"{name}-momentum", float(momentum)
                if self.log_weight_decay:
                    yield f"{name}-weight_decay", float(group.get("weight_decay", 0.0))

    def _name(self, trainer: TrainerView, optimizer: Any) -> str:
        for config in trainer.lr_scheduler_configs:
            if config.name and getattr(config.scheduler, "optimizer", None) is optimizer:
                return str(config.name)
        return f"lr-{type(optimizer).__name__}"
