"""Options of the command line that are fields of attrs classes: one class for each launcher and each target.

A class has exactly the options that have an effect on what it starts. The parser has the options of all classes, and an
option that the chosen class does not have is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from stratagem.api.options import convert, option_types
from stratagem.errors import ConfigError

T = TypeVar("T", bound=attrs.AttrsInstance)


def cli_option(about: str, value: str = "N", *, default: Any = None, validator: Any = None) -> Any:
    """Return a field for a class of options.

    Args:
        about: what it does, for ``--help``.
        value: what its value is called in ``--help``.
    """
    return attrs.field(default=default, validator=validator, metadata={"help": about, "value": value})


def flag(field: str) -> str:
    """Return the option of the command line for a field."""
    return f"--{field.replace('_', '-')}"


def declare(parser: argparse.ArgumentParser, classes: Mapping[str, type[Any]]) -> None:
    """Add the options of all `classes` to `parser`; the help of each one names the classes that have it."""
    fields = {field.name: field for cls in reversed(list(classes.values())) for field in attrs.fields(cls)}
    for name, field in fields.items():
        if not field.metadata["help"]:
            continue  # the parser has it already
        owners = [title for title, cls in classes.items() if attrs.fields_dict(cls).keys() & {name}]
        about = f"{field.metadata['help']} [{'all' if len(owners) == len(classes) else ', '.join(owners)}]"
        parser.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=about, **_action(field))


def _action(field: attrs.Attribute[Any]) -> dict[str, Any]:
    if field.default is False:
        return {"action": "store_true"}
    return {"metavar": field.metadata["value"], "action": "append" if field.default == () else "store"}


def refused(given: Iterable[str], cls: type[Any]) -> list[str]:
    """Return the options of `given` that `cls` does not have."""
    return [name for name in given if name not in attrs.fields_dict(cls)]


def build(cls: type[T], given: Mapping[str, Any], chosen: str, classes: Mapping[str, type[Any]]) -> T:
    """Return an object of `cls` with the options `given`, as text from the command line.

    Args:
        chosen: how `cls` was chosen, such as ``--launcher srun``.
        classes: all classes, by how each one is chosen.

    Raises:
        ConfigError: an option that `cls` does not have, or a value of the wrong type or range.
    """
    if wrong := refused(given, cls):
        others = [title for title, other in classes.items() if not refused(wrong[:1], other)]
        raise ConfigError(
            f"{flag(wrong[0])} is set, which {chosen} does not use",
            expected=f"its options: {', '.join(sorted(map(flag, attrs.fields_dict(cls))))}",
            do=f"leave it out, or choose {' or '.join(others)}",
        )
    types = option_types(cls)
    values = {name: convert(value, types[name], flag(name), text=True) for name, value in given.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        name = error.found.removeprefix(f"{cls.__name__}.")  # validators write the class and the field
        if name == error.found:
            raise
        field, _, rest = name.partition(" ")
        raise ConfigError(f"{flag(field)} {rest}", expected=error.expected, do=error.do) from None
