"""Defaults of options, and what the environment has."""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.util import find_spec

from stratagem.errors import ConfigError


def nothing() -> None:
    """Return None: what a reference to a module that is gone returns."""
    return


def minute() -> timedelta:
    return timedelta(seconds=60)


def read_number(option: int | None, variable: str) -> int | None:
    """Return an option, or the number that a variable holds.

    Raises:
        ConfigError: the variable has another text.
    """
    text = os.environ.get(variable)
    if option is not None or text is None:
        return option
    if not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r}", expected="a number")
    return int(text)


def is_installed() -> bool:
    """Return whether torchft can be imported."""
    return find_spec("torchft") is not None
