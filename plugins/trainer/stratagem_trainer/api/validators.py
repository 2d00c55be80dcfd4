"""Validators for options of callbacks, beside those of `stratagem.api.validators`: durations, batches, accumulation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from stratagem.api.validators import Validator, rule
from stratagem.errors import ConfigError, shown


def read_duration(value: Any, option: str) -> timedelta | None:
    """Return a duration that is given in seconds, as a timedelta or a timedelta's arguments, or as "DD:HH:MM:SS".

    Raises:
        ConfigError: `value` is something else, or negative.
    """
    expected = 'seconds, a timedelta, {"minutes": 5} or "DD:HH:MM:SS", at least 0'
    if isinstance(value, str):
        if not re.fullmatch(r"\d{1,6}(:\d{1,6}){3}", value, re.ASCII):
            raise ConfigError(f"{option} is {shown(value)}", expected=expected)
        days, hours, minutes, seconds = map(int, value.split(":"))
        value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(value, int | float | Mapping) and not isinstance(value, bool):
        arguments = value if isinstance(value, Mapping) and value else {"seconds": value}
        try:
            value = timedelta(**arguments)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{option} is {shown(value)}", expected=expected) from None
    if value is not None and not (isinstance(value, timedelta) and value >= timedelta()):
        raise ConfigError(f"{option} is {shown(value)}", expected=expected)
    return value


def duration_or_text(instance: Any, attribute: Any, value: Any) -> None:
    """Accept what `read_duration` reads."""
    read_duration(value, f"{type(instance).__name__}.{attribute.name}")


def at_least_or_unlimited(low: int) -> Validator:
    """Accept whole numbers from `low` on, and -1 for no limit."""
    return rule(lambda value: value == -1 or value >= low, f"at least {low}, or -1 for no limit")


def _is_limit(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value >= 0 if isinstance(value, int) else 0.0 <= value <= 1.0


#: Accept a number of batches (int) or a fraction of them (float from 0.0 to 1.0).
batch_limit = rule(_is_limit, "a whole number of batches, or a fraction of them from 0.0 to 1.0")


def read_accumulation(value: Any, option: str = "accumulate_grad_batches") -> dict[int, int]:
    """Return the number of batches that each optimizer step accumulates, by the first epoch to which it applies.

    Args:
        value: one number for all epochs, or a mapping such as the one that is returned.
        option: the name of the option in messages.

    Raises:
        ConfigError: epoch 0 is missing, an epoch is negative, or a number is less than 1.
    """
    schedule = dict(value) if isinstance(value, Mapping) else {0: value}
    wrong = [
        (epoch, factor)
        for epoch, factor in schedule.items()
        if type(epoch) is not int or epoch < 0 or type(factor) is not int or factor < 1
    ]
    if wrong:
        epoch, factor = wrong[0]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{option} is {factor!r}", expected="at least 1")
        raise ConfigError(
            f"{option} is {factor!r} from epoch {epoch!r}", expected="at least 1, from an epoch counted from 0"
        )
    if 0 not in schedule:
        raise ConfigError(
            f"{option} begins at epoch {min(schedule, default='(none)')}", expected="a number for epoch 0 too",
            do=f"write {{0: 1, {', '.join(f'{e}: {f}' for e, f in schedule.items())}}}",
        )  # fmt: skip
    return dict(sorted(schedule.items()))


def accumulation(_: Any, __: Any, value: Any) -> None:
    """Accept what `read_accumulation` reads."""
    if isinstance(value, int | Mapping):
        read_accumulation(value)
