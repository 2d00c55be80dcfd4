"""A metric that decides something: there, and the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from stratagem.api.world import Collectives


class HasCollectives(Protocol):
    """A run, as far as a decision needs it."""

    @property
    def collectives(self) -> Collectives: ...


class HasMetrics(Protocol):
    """A trainer, as far as a decision needs it."""

    callback_metrics: dict[str, Any]

    @property
    def run(self) -> HasCollectives: ...


class Validates(Protocol):
    """A trainer, as far as it tells when it validates."""

    num_val_batches: list[float]

    @property
    def settings(self) -> Any: ...


def acts_after_epoch(trainer: Validates, chosen: bool | None) -> bool:
    """Return whether to decide at the end of the training epoch, rather than after validation.

    If it is not `chosen`: where each epoch ends with its only validation, or with none.
    """
    if chosen is not None or not any(trainer.num_val_batches):
        return chosen is not False
    return bool(trainer.settings.val_check_interval == 1.0 and trainer.settings.check_val_every_n_epoch == 1)


def monitored(trainer: HasMetrics, who: str, name: str, strict: bool = True, do: str = "") -> float | None:
    """Return the value of metric `name`; None if nobody logged it and that is not `strict`. Collective.

    `who` decides by it, and is named in errors; `do` says what else may help where it is missing.

    Raises:
        ConfigError: nobody logged it, or ranks logged different values and would decide differently.
    """
    value = trainer.callback_metrics.get(name)
    mine = None if value is None else float(value)
    values = trainer.run.collectives.all_gather_object(mine)
    if all(each is None for each in values):
        if not strict:
            return None
        known = sorted(trainer.callback_metrics)
        raise ConfigError(
            f"{who}.monitor is {name!r}, which nobody logged",
            expected=f"one of {', '.join(known) or 'the logged metrics (there are none yet)'}",
            do=(nearest(name, known) or f"log it with self.log({name!r}, ...)") + do,
        )
    if any(repr(each) != repr(values[0]) for each in values):
        shown = ", ".join(
            f"{each if each is None else format(each, '.6g')} on rank {i}" for i, each in enumerate(values)
        )
        raise ConfigError(
            f"{who}.monitor {name!r} is {shown}", expected="one value on all ranks, as all follow the same decision",
            do=f"log it with self.log({name!r}, ..., sync_dist=True)",
        )  # fmt: skip
    return mine
