"""A metric that decides something: there, and the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from stratagem.api.world import Collectives
    from stratagem_trainer.api.published import Published


class HasCollectives(Protocol):
    """A run, as far as a decision needs it."""

    @property
    def collectives(self) -> Collectives: ...


class HasMetrics(Protocol):
    """A trainer, as far as a decision needs it."""

    @property
    def published(self) -> Published: ...

    @property
    def run(self) -> HasCollectives: ...


def monitored(trainer: HasMetrics, who: str, name: str, strict: bool = True, do: str = "") -> float | None:
    """Return the value of metric `name`; None if nobody logged it and that is not `strict`. Collective.

    `who` decides by it, and is named in errors; `do` says what else may help where it is missing.

    Raises:
        ConfigError: nobody logged it, or ranks logged different values and would decide differently.
    """
    metrics = trainer.published.exact
    value = metrics.get(name)
    mine = None if value is None else float(value)
    values = trainer.run.collectives.all_gather_object(mine)
    if all(each is None for each in values):
        if not strict:
            return None
        known = sorted(metrics)
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
