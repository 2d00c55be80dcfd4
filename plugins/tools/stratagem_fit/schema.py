"""``stratagem schema``: print the JSON Schema of run files, for completion and checks in editors."""

from __future__ import annotations

import argparse
import collections.abc
import enum
import json
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs

from stratagem.api import Command
from stratagem.api.options import option_types, options
from stratagem.config.settings import added_arguments
from stratagem.discovery import registry
from stratagem.errors import StratagemError
from stratagem_trainer.option_texts import option_docs
from stratagem_trainer.settings import TrainerSettings

#: Arguments of the Trainer that accept several plugins of a kind.
_SEVERAL = {argument for argument, kind in registry.arguments().items() if not registry.kinds()[kind].single}
#: Values of a choice other than plugins.
_OTHER_VALUES: dict[str, list[Any]] = {
    "strategy": ["auto", None], "accelerator": ["auto", None], "environment": ["auto", None], "precision": [None],
    "comm_hook": [None], "launcher": [None], "checkpoint": [None], "callbacks": [None], "logger": [True, False, None],
}  # fmt: skip
#: Types in files of arguments annotated with Any, which accept objects in code.
_FILE_TYPES: dict[str, Any] = {
    "devices": int | str | list[int] | None,
    "activation_checkpointing": str | list[str] | dict | None,
}


class Schema(Command):
    """The command ``stratagem schema``."""

    help = "print the JSON Schema of run files, with the options of the installed plugins, for editors"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add no arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        print(json.dumps(schema(), indent=2, ensure_ascii=False))
        return 0


def schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12); generated from the Trainer's settings and the options of installed plugins."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stratagem run file",
        "type": "object",
        "properties": {
            "seed": {
                "description": "Seeds Python, NumPy and torch before anything is built.",
                "anyOf": [{"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, {"type": "null"}],
            },
            "model": {"description": "A stratagem.Module, or a function that returns one.", "$ref": "#/$defs/object"},
            "data": {
                "description": "A stratagem.DataModule, or a function that returns one.",
                "$ref": "#/$defs/object",
            },
            "trainer": {"description": "Arguments of the Trainer.", "$ref": "#/$defs/trainer"},
            "ckpt_path": {
                "description": 'Resume from, or evaluate, this checkpoint: a path, or "last".',
                "type": ["string", "null"],
            },
        },
        "required": ["model"],
        "additionalProperties": False,
        "$defs": {"object": _OBJECT, "trainer": _trainer(), **{kind: _kind(kind) for kind in registry.kinds()}},
    }


_PATH_OF_CLASS = {"type": "string", "pattern": r"^[^\W\d]\w*(\.[^\W\d]\w*)+$", "title": "package.module.Class"}
# If-then-else rather than anyOf: errors then refer to the alternative that was meant.
_OBJECT = {
    "if": {"type": "object"},
    "then": {
        "properties": {
            "class_path": _PATH_OF_CLASS,
            "init_args": {"description": "Its arguments, by name.", "type": ["object", "null"]},
        },
        "required": ["class_path"],
        "additionalProperties": False,
    },
    "else": _PATH_OF_CLASS | {"type": ["string", "null"]},
}


# --- The trainer -------------------------------------------------------------------------------------------------


def _trainer() -> dict[str, Any]:
    fields, types_of, docs = options(TrainerSettings), option_types(TrainerSettings), option_docs(TrainerSettings)
    properties = {name: _argument(name, types_of[name]) | _notes(name, fields[name], docs) for name in fields}
    for name in added_arguments(TrainerSettings):
        doc = registry.kinds()[registry.arguments()[name]].doc
        notes = {"title": name, "default": None} | ({"description": doc} if doc else {})
        properties[name] = _argument(name, Any) | notes
    return {
        "type": ["object", "null"],
        "properties": properties,
        "patternProperties": {
            rf"^({'|'.join(registry.dotted())})\.": {"description": "An option of the plugin of that kind."}
        },
        "additionalProperties": False,
    }


def _argument(name: str, annotation: Any) -> dict[str, Any]:
    if name in registry.arguments():
        one: dict[str, Any] = {"$ref": f"#/$defs/{registry.arguments()[name]}"}
        one = {"if": {"type": "array"}, "then": {"items": one}, "else": one} if name in _SEVERAL else one
        return {"if": {"enum": _OTHER_VALUES.get(name, [False, None])}, "then": True, "else": one}
    if name == "plugins":
        any_kind = {"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in registry.kinds()]}
        return {"if": {"type": "array"}, "then": {"items": any_kind}, "else": any_kind}
    if name == "profiler":
        return {"anyOf": [{"type": "string"}, {"type": "object", "required": ["name"]}, {"enum": [None, False]}]}
    return of_type(_FILE_TYPES.get(name, annotation)) or {}


def _notes(name: str, field: attrs.Attribute[Any], docs: Mapping[str, str]) -> dict[str, Any]:
    notes: dict[str, Any] = {"title": name}
    if doc := docs.get(field.name):
        notes["description"] = doc
    default = field.default
    if default is None or isinstance(default, bool | int | float | str):
        notes["default"] = default
    return notes


# --- Plugins -----------------------------------------------------------------------------------------------------


def _kind(kind: str) -> dict[str, Any]:
    """Return the schema of a plugin of `kind`: a name, or a mapping with name and options."""
    entries = {entry: _mapping(entry) for entry in registry.entries(kind)}
    names = {alias: each for entry, each in entries.items() for alias in (entry.name, entry.qualified_name)}
    known = [{"const": name} | {key: each[key] for key in ("title",) if key in each} for name, each in names.items()]
    numbers = [{"const": int(name)} for name in names if kind == "precision" and name.isdecimal()]
    return {
        "if": {"type": "object"},
        "then": {
            "properties": {"name": {"enum": list(names)}},
            "required": ["name"],
            "allOf": [{"if": _is_named(entry), "then": each} for entry, each in entries.items()],
        },
        "else": {"anyOf": known + numbers},
    }


def _is_named(entry: registry.Entry) -> dict[str, Any]:
    return {"properties": {"name": {"enum": [entry.name, entry.qualified_name]}}, "required": ["name"]}


def _mapping(entry: registry.Entry) -> dict[str, Any]:
    """Return the schema of a mapping that chooses the plugin of `entry`."""
    from stratagem_plugin_checks import class_of  # with torch; `stratagem --help` imports this module

    try:
        cls = class_of(entry)
    except StratagemError:  # broken, or not for this machine: its name is known, its options are not
        return {}
    types_of, docs, fields = option_types(cls), option_docs(cls), options(cls)
    shapes = {name: of_type(types_of[name]) for name in fields}
    properties = {name: shape | _notes(name, fields[name], docs) for name, shape in shapes.items() if shape is not None}
    # A preset is a function, which sets required options of its class.
    preset = not isinstance(entry.load(), type)
    return {
        "title": _first_sentence(cls) or entry.name,
        "properties": {"name": True, **properties},
        "required": [name for name, each in fields.items() if each.default is attrs.NOTHING and not preset],
        "additionalProperties": False,
    }


def _first_sentence(cls: type[Any]) -> str:
    text = " ".join((cls.__doc__ or "").split())
    return text.split(". ")[0].rstrip(".")


# --- Types -------------------------------------------------------------------------------------------------------

_NAMES: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"},
    type(None): {"type": "null"}, Path: {"type": "string"}, timedelta: {"type": "number", "description": "seconds"},
}  # fmt: skip


def of_type(annotation: Any) -> dict[str, Any] | None:
    """Return the schema of values in a file for `annotation`; None if a file cannot express it."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if annotation is Any:
        return {}
    if origin in _NAMES:
        return dict(_NAMES[origin])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        members = [shape for member in arguments if (shape := of_type(member)) is not None]
        return {"anyOf": members} if members else None
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return {"enum": list(dict.fromkeys([value for member in origin for value in (member.value, member.name)]))}
    if origin in (dict, collections.abc.Mapping):
        return {"type": "object", "additionalProperties": (of_type(arguments[1]) or False) if arguments else {}}
    if origin in (list, tuple, set, frozenset, collections.abc.Sequence):
        return _of_list(origin, arguments)
    return None


def _of_list(origin: Any, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    if origin is tuple and len(arguments) > 1 and Ellipsis not in arguments:
        items = [of_type(each) for each in arguments]
        if None in items:
            return None
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    item = of_type(arguments[0]) if arguments else {}
    return None if item is None else {"type": "array", "items": item}
