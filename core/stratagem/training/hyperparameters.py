"""Hyper-parameters: the arguments of a module's constructor, as a dictionary with attributes."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from stratagem.errors import CheckpointError, ConfigError, nearest, shown

if TYPE_CHECKING:
    from torch import nn


class Hyperparameters(dict[str, Any]):
    """A dictionary whose items are attributes as well: ``self.hparams.width``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = nearest(name, self) or "see save_hyperparameters"
            raise AttributeError(f"no hyper-parameter is called {name!r}; {hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def logged_hyperparameters(module: Any) -> dict[str, Any]:
    """Return the hyper-parameters of `module`, a `Module` or a `DataModule`, that loggers get."""
    unlogged = module.__dict__.get("_unlogged", ())
    return {name: value for name, value in module.hparams.items() if name not in unlogged}


def items_of(value: Any) -> dict[str, Any]:
    """Return what a mapping, a namespace or a dataclass holds, by name."""
    if isinstance(value, Mapping):
        items = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        items = dict(vars(value))
    elif attrs.has(type(value)):
        items = {each.name: getattr(value, each.name) for each in attrs.fields(type(value))}
    else:
        raise ConfigError(
            f"save_hyperparameters was given {shown(value)}",
            expected="names of arguments, a mapping, a namespace or a dataclass",
        )
    if odd := next((name for name in items if not isinstance(name, str)), None):
        raise ConfigError(f"save_hyperparameters was given a mapping with the key {shown(odd)}", expected="names")
    return items


def constructor_arguments(module: nn.Module, frame: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the arguments of the running constructors of `module`; those of a derived class replace its base's.

    The second result names arguments that only constructors of derived classes take, not the one that asks.
    """
    found: dict[str, Any] = {}
    mine: set[str] | None = None
    frame = frame.f_back
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if not names or frame.f_locals.get(names[0]) is not module:
            break
        if frame.f_code.co_name == "__init__":
            arguments = inspect.getargvalues(frame)
            keywords = arguments.locals.get(arguments.keywords or "", {})
            keyword_only = frame.f_code.co_varnames[len(names) : len(names) + frame.f_code.co_kwonlyargcount]
            own = {name: arguments.locals[name] for name in (*names[1:], *keyword_only) if name in arguments.locals}
            found |= own | {name: value for name, value in keywords.items() if not name.startswith("_")}
            mine = set(found) if mine is None else mine
        frame = frame.f_back
    return found, set(found) - (mine or set())


def check_storable(cls: str, name: str, value: Any) -> None:
    from stratagem.api.json_tree import encode

    try:
        encode(value, lambda *_: 0, name)
    except CheckpointError as error:
        raise ConfigError(
            f"{cls}.save_hyperparameters: {error.found}",
            expected="tensors, numbers, strings and containers of them, which a checkpoint can hold",
            do=f"leave it out with save_hyperparameters(ignore=[{name!r}])",
        ) from None
