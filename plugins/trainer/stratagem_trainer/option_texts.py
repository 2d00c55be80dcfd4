"""What is written about an option, for people: its type, its default, its ``#:`` comment."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import attrs

from stratagem.api.options import describe, option_types, options, redact
from stratagem.errors import shown
from stratagem_trainer.terminal import wrapped


def option_docs(cls: type[Any]) -> dict[str, str]:
    """Return the ``#:`` comments above the fields of `cls` and its bases, by field name; empty without source code."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _own_docs(base)
    return docs


@functools.cache  # to find a class in its file takes milliseconds, and each option asks
def _own_docs(cls: type[Any]) -> dict[str, str]:
    try:
        source = inspect.getsource(cls) if cls is not object else ""
    except (OSError, TypeError):
        return {}
    docs: dict[str, str] = {}
    for match in re.finditer(r"((?:^[ \t]*#:.*\n)+)^[ \t]*(\w+)[ \t]*:", source, re.MULTILINE):
        lines = [line.strip().removeprefix("#:").strip() for line in match[1].strip().splitlines()]
        docs[match[2]] = " ".join(lines)
    return docs


def option_texts(cls: type[Any], instance: Any = None) -> Iterator[dict[str, str]]:
    """Yield name, type, default and ``#:`` comment of each option of `cls`; values of `instance` as defaults."""
    docs, types = option_docs(cls), option_types(cls)
    for name, field in options(cls).items():
        value = _default(field) if instance is None else shown(redact(name, getattr(instance, field.name)), None)
        yield {"name": name, "type": describe(types[name]), "default": value, "doc": docs.get(field.name, "")}


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "(required)"
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "(computed)" if default.takes_self else shown(default.factory(), None)
    return shown(default, None)


def help_lines(head: str, doc: str) -> list[str]:
    """Return the lines of an option's help: `head`, and its comment `doc` below it."""
    return [wrapped(head, "  ", "      "), *([wrapped(doc, "      ")] if doc else [])]


def as_written(default: str) -> str:
    """Return a default as it is written on a command line and in a run file."""
    return {"True": "true", "False": "false", "None": "not set"}.get(default, default)
