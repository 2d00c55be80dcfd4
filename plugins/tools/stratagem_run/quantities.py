"""Times, amounts of memory and signals: one form on the command line, another one in each scheduler."""

from __future__ import annotations

import re
import signal
from datetime import timedelta

from attrs import frozen

from stratagem.errors import ConfigError

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_time(text: str) -> timedelta:
    """Return the time that `text` states: ``24:00:00``, ``2-12:00:00``, ``36h``, ``90m``.

    Raises:
        ConfigError: it has another form. A number alone means minutes to one scheduler and seconds to another.
    """
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text, re.ASCII):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif with_unit := re.fullmatch(r"(\d+)([dhms])", text, re.ASCII):
        found = timedelta(seconds=int(with_unit[1]) * _UNITS[with_unit[2]])
    else:
        found = timedelta()
    if not found:
        raise ConfigError(
            f"--time is {text!r}", expected="hours:minutes:seconds, days-hours:minutes:seconds, or 36h, 90m",
            do="write for example --time 24:00:00",
        )  # fmt: skip
    return found


def clock(time: timedelta) -> str:
    """Return `time` as SLURM writes it: ``2-12:00:00``."""
    minutes, seconds = divmod(time.seconds, 60)
    days = f"{time.days}-" if time.days else ""
    return f"{days}{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def minutes(time: timedelta) -> int:
    """Return `time` in minutes, rounded up."""
    return -int(-time.total_seconds() // 60)


def parse_memory(text: str) -> tuple[int, str]:
    """Return a number and a unit of 1024 bytes and its powers: K, M, G or T.

    Raises:
        ConfigError: `text` has another form.
    """
    found = re.fullmatch(r"([1-9]\d*)([KMGT])(?:i?B|i)?", text, re.IGNORECASE | re.ASCII)
    if found is None:
        raise ConfigError(
            f"--memory is {text!r}", expected="a whole number and K, M, G or T", do="write for example --memory 64G"
        )
    return int(found[1]), found[2].upper()


@frozen
class EarlySignal:
    """A signal that a scheduler sends before it ends a job, and how many seconds before."""

    name: str
    seconds: int


def parse_signal(text: str) -> EarlySignal:
    """Return the signal and the time of ``SIGUSR1@90``.

    Raises:
        ConfigError: there is no such signal, or `text` has another form.
    """
    found = re.fullmatch(r"(?:SIG)?([A-Z]+\d?)(?:@(\d+))?", text.upper(), re.ASCII)
    if found is None or f"SIG{found[1]}" not in signal.Signals.__members__:
        raise ConfigError(
            f"--signal is {text!r}", expected="the name of a signal, and after @ the seconds before the time limit",
            do="write for example --signal SIGUSR1@90",
        )  # fmt: skip
    return EarlySignal(f"SIG{found[1]}", int(found[2] or 60))
