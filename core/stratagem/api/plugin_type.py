"""`PluginType`: how plugins are made, copied and shown."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

from attrs import fields


def _state(plugin: Any) -> dict[str, Any]:
    names = [each.name for each in fields(type(plugin)) if hasattr(plugin, each.name)]
    return {name: getattr(plugin, name) for name in names} | getattr(plugin, "__dict__", {})


def _set_state(plugin: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(plugin, name, value)  # attrs would validate it


def _attrs_makes(cls: type) -> bool:
    """Whether attrs has written the constructor of `cls`, rather than its author."""
    owner = next(each for each in cls.__mro__ if "__init__" in vars(each))
    return "__attrs_attrs__" in vars(owner)


class PluginType(ABCMeta):
    """Makes the constructor of every plugin raise the same errors for wrong options as a mapping of options.

    It derives from ABCMeta so that a plugin can inherit an abstract class too.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        """Make copies and pickles include attributes that are not attrs fields, as a subclass with `__init__` has."""
        namespace.setdefault("__getstate__", _state)
        namespace.setdefault("__setstate__", _set_state)
        return super().__new__(mcs, name, bases, namespace, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What notebooks and `help` show: the options, those of `positional` first."""
        first = getattr(cls, "positional", ()) if _attrs_makes(cls) else ()
        init = inspect.signature(cls.__init__)  # type: ignore[misc]
        parameters = {each.name: each for each in [*init.parameters.values()][1:]}
        ordered = [parameters[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
        return inspect.Signature([*ordered, *(each for name, each in parameters.items() if name not in first)])

    def __call__(cls, *values: Any, **options: Any) -> Any:
        names = getattr(cls, "positional", ())
        if 0 < len(values) <= len(names) and not options.keys() & set(names[: len(values)]) and _attrs_makes(cls):
            values, options = (), dict(zip(names, values, strict=False)) | options
        try:
            return super().__call__(*values, **options)
        except TypeError as error:
            from stratagem.api.options import explain_call

            if explained := explain_call(cls, values, options):
                raise explained from None
            raise error
