"""Lists, and what a mapping, a namespace or a dataclass holds by name, also of other libraries' types."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from stratagem.errors import ConfigError, shown


def is_list(value: Any) -> bool:
    """Whether `value` is a list of any type, such as a configuration library's."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_list(value: Any) -> list[Any]:
    """Return the items of a list, or anything else as the only item."""
    return list(value) if is_list(value) else [value]


def items_of(value: Any, caller: str) -> dict[str, Any]:
    """Return what a mapping, a namespace or a dataclass holds, by name.

    Args:
        caller: the function that was given `value`, for messages.

    Raises:
        ConfigError: `value` is something else, or has keys that are not text.
    """
    if isinstance(value, Mapping):
        items = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        items = dict(vars(value))
    elif attrs.has(type(value)):
        items = {each.name: getattr(value, each.name) for each in attrs.fields(type(value))}
    else:
        expected = "a mapping, a namespace or a dataclass"
        names = "names of arguments, " * (caller == "save_hyperparameters")
        raise ConfigError(f"{caller} was given {shown(value)}", expected=names + expected)
    if odd := next((name for name in items if not isinstance(name, str)), None):
        raise ConfigError(f"{caller} was given a mapping with the key {shown(odd)}", expected="names")
    return items
