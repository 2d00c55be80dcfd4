"""A call for each option of a plugin, made from its type and default, and built to see that it is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs

from stratagem.api.options import option_types, options
from stratagem.discovery import registry
from stratagem.discovery.registry import Entry
from stratagem.errors import StratagemError
from stratagem.stack.construction import make

#: Characters of a line of code that a phone shows beside the margins.
PHONE = 56


def example(plugins: Sequence[Entry], cls: type, name: str) -> str:
    """Return a call that sets the option `name` to a valid value that is not its default.

    An option that has an effect only beside others is set on a name that stands for them, or beside another option. The
    call is "" for an option whose values have no short form, such as a callable.

    Args:
        plugins: the entry point of `cls`, then those of its presets.
        cls: the class. A field's ``metadata={"example": value}`` has precedence over what its type suggests.
    """
    for values in _settings(cls, name):
        for entry in plugins if len(values) == 1 else plugins[:1]:
            with suppress(StratagemError):
                make(entry, values)
                return _call(entry, values)
    return ""


def _call(entry: Entry, values: dict[str, Any]) -> str:
    """Return the call that chooses the plugin of `entry` with `values`, in lines that fit on a phone."""
    argument = registry.argument_of(entry.kind)
    pairs = [f'"{option}": {_shown(value)}' for option, value in ({"name": entry.name} | values).items()]
    line = f"Trainer({argument}={{{', '.join(pairs)}}})"
    if len(line) <= PHONE:
        return line
    return "\n".join([f"Trainer({argument}={{", *(f"    {pair}," for pair in pairs), "})"])


def _settings(cls: type, name: str) -> Iterator[dict[str, Any]]:
    """Yield options to try: `name` alone, then beside one other."""
    values = list(_candidates(cls, name))
    yield from ({name: value} for value in values)
    others = ({other: value} for other in options(cls) if other != name for value in _candidates(cls, other))
    yield from (other | {name: value} for other in others if False not in other.values() for value in values)


def _candidates(cls: type, name: str) -> Iterator[Any]:
    field = options(cls)[name]
    if "example" in field.metadata:
        yield field.metadata["example"]
    else:
        yield from _values(option_types(cls)[name], field.default)


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value) if isinstance(value, str | list) else repr(value).replace("'", '"')


def _values(annotation: Any, default: Any) -> Iterator[Any]:
    """Yield values of the type that are not the default, the best first."""
    default = None if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    if get_origin(annotation) is Literal:
        yield from (choice for choice in get_args(annotation) if choice != default)
    elif annotation is bool:
        yield default is not True
    elif annotation is int:
        yield from (default * 2, 4) if default else (2, 4)
    elif annotation is float:
        yield from (default * 2 if default >= 1 else default / 2, 0.5) if default else (0.5, 2.0)
    elif annotation is timedelta:
        yield 600
    elif annotation is Path:
        yield "/local_disk"
    else:
        members = [each for each in get_args(annotation) if each is not type(None)]
        is_union = not isinstance(annotation, type) and get_origin(annotation) not in (list, dict, tuple, set)
        yield from (value for each in members if is_union for value in _values(each, default))
