"""Say what is wrong with a plugin: it cannot be loaded, its options are unknown, its hooks do not exist."""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs

from stratagem.api.kinds import Environment, Plugin
from stratagem.discovery import registry
from stratagem.discovery.registry import Entry
from stratagem.errors import ConfigError, StratagemError, nearest
from stratagem.stack.construction import make
from stratagem.stack.plugins import hook_functions, hook_implementations, hook_specifications


def class_of(entry: Entry) -> type[Any]:
    """Return the class of the plugin of `entry`.

    Raises:
        StratagemError: it cannot be imported, or the preset cannot be created on this machine.
    """
    target = entry.load()
    return target if isinstance(target, type) else type(make(entry, {}))


def check_entry(entry: Entry) -> str | None:
    """Return one sentence about what is wrong with an installed plugin; None if nothing is."""
    try:
        if entry.kind == "command":
            entry.load()
            return None
        cls = class_of(entry)
    except ConfigError:
        return None  # a preset that cannot be built on this machine
    except StratagemError as error:
        return str(error)
    return check_class(cls, entry.kind)


def check_class(cls: type[Any], kind: str) -> str | None:
    """Return one sentence about what is wrong with a plugin class of `kind`; None if nothing is."""
    base = registry.kinds()[kind].base
    if not issubclass(cls, base):
        return f"{cls.__name__} is not a stratagem.{base.__name__}."
    if problem := _check_options(cls):
        return problem
    known = hook_specifications()
    for hook, marker in hook_implementations(cls, of_class=True).items():
        if hook not in known:
            return f"it implements {hook!r}, which is not a hook; {nearest(hook, known) or 'see docs/hooks.md'}."
        given = set(inspect.signature(getattr(cls, hook)).parameters) - {"self"}
        unknown = given - set(inspect.signature(hook_functions()[hook]).parameters)
        if unknown:
            return f"its {hook} takes {', '.join(sorted(unknown))}, which that hook does not pass."
        if marker["wrapper"] and not inspect.isgeneratorfunction(getattr(cls, hook)):
            return f"its {hook} is a wrapper without a yield."
    return _check_detect(cls) if issubclass(cls, Environment) else None


def _check_detect(cls: type[Environment]) -> str | None:
    declared = str(inspect.get_annotations(cls.detect).get("return"))
    if "str" not in re.findall(r"\w+", declared):
        return None
    return (
        f"its detect() is declared to return {declared!r}, which is ignored; return a stratagem.api.Evidence, or None."
    )


def _check_options(cls: type[Any]) -> str | None:
    decorate = "decorate it with @define(eq=False, kw_only=True)"
    if not attrs.has(cls):
        return f"{cls.__name__} has no attrs options; {decorate}."
    fields = {field.name for field in attrs.fields(cls)}
    for owner in cls.__mro__:
        for name, annotation in inspect.get_annotations(owner).items():
            if issubclass(owner, Plugin) and name not in fields and "ClassVar" not in str(annotation):
                return f"{owner.__name__}.{name} is annotated, but not an attrs field; {decorate}, or use ClassVar."
    if "__init__" in vars(cls) and "__attrs_attrs__" not in vars(cls):
        return f"{cls.__name__} has its own __init__, so its options are unknown; {decorate}."
    if cls.__eq__ is not object.__eq__:
        return f"{cls.__name__} defines __eq__, so two equal ones would count as one plugin; {decorate}."
    return None
