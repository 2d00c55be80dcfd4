"""Hyper-parameters: the arguments of a module's constructor, as a dictionary with attributes."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from stratagem.errors import CheckpointError, ConfigError, nearest, shown


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


class HyperparametersMixin:
    """`save_hyperparameters` and `hparams`, for a class of any kind."""

    def save_hyperparameters(self, *names: Any, ignore: str | Sequence[str] | None = (), logger: bool = True) -> None:
        """Remember the arguments of ``__init__`` (all, or `names`): `hparams`, checkpoints and loggers get them.

        What a derived class's ``__init__`` was given is remembered too. What a checkpoint cannot hold, such as a class
        or a module, is in `hparams` and not in checkpoints; loggers get its name. A warning says so, unless it is the
        default of that argument.

        Args:
            names: those to remember, rather than all; or one mapping, namespace or dataclass, whose items are
                remembered instead. `load_from_checkpoint` hands them to the argument that it was.
            ignore: those to leave out, also where a base class has remembered them.
            logger: False: loggers do not get them.

        Raises:
            ConfigError: no such argument.
        """
        given = constructor_arguments(self, inspect.currentframe())
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        objects = [each for each in names if not isinstance(each, str)]
        if objects:
            if len(names) > 1:
                raise ConfigError(
                    f"save_hyperparameters was given {len(names)} values", expected="names of arguments, or one object",
                    do="merge them into one dictionary",
                )  # fmt: skip
            self.__dict__["_hparams_name"] = next((name for name, value in given.items() if value is objects[0]), "")
            given, names = items_of(objects[0], "save_hyperparameters"), ()
        for name in [*names, *ignored]:
            if name not in given:
                raise ConfigError(
                    f"save_hyperparameters names {name!r}", expected=f"arguments of {type(self).__name__}.__init__",
                    do=nearest(name, given),
                )  # fmt: skip
        chosen = {name: given[name] for name in (names or given) if name not in ignored}
        unlogged = self.__dict__.setdefault("_unlogged", set())
        unlogged.difference_update(chosen) if logger else unlogged.update(chosen)
        for name, value in chosen.items():
            if not _is_storable(value) and value is not self.hparams.get(name) and not _is_default(self, name, value):
                warnings.warn(
                    f"{type(self).__name__}.save_hyperparameters: {name}={shown(value)} is kept in hparams and left "
                    f"out of checkpoints, which cannot hold it; pass load_from_checkpoint(path, {name}=...), or leave "
                    f"it out with save_hyperparameters(ignore=[{name!r}])",
                    stacklevel=2,
                )
        self.hparams.update(chosen)
        for name in ignored:
            self.hparams.pop(name, None)

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` remembered: a dictionary, its items attributes as well."""
        hparams: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return hparams


def items_of(value: Any, caller: str) -> dict[str, Any]:
    """Return what a mapping, a namespace or a dataclass holds, by name.

    Args:
        caller: the function that was given `value`, for messages.

    Raises:
        ConfigError: `value` is something else, or has keys that are not text.
    """
    if isinstance(value, Mapping):
        items = dict(value)
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        items = dict(vars(value))
    elif dataclasses.is_dataclass(type(value)) or attrs.has(type(value)):
        fields: Any = dataclasses.fields if dataclasses.is_dataclass(value) else attrs.fields
        items = {each.name: getattr(value, each.name) for each in fields(type(value))}
    else:
        expected = "a mapping, a namespace or a dataclass"
        names = "names of arguments, " * (caller == "save_hyperparameters")
        raise ConfigError(f"{caller} was given {shown(value)}", expected=names + expected)
    if odd := next((name for name in items if not isinstance(name, str)), None):
        raise ConfigError(f"{caller} was given a mapping with the key {shown(odd)}", expected="names")
    return items


def logged_hyperparameters(owner: HyperparametersMixin) -> dict[str, Any]:
    """Return the hyper-parameters of `owner` that loggers get; names for what is not a number, text or container."""
    unlogged = owner.__dict__.get("_unlogged", ())
    chosen = {name: value for name, value in owner.hparams.items() if name not in unlogged}
    return {name: value if _is_storable(value) else _name_of(value) for name, value in chosen.items()}


def stored_hyperparameters(owner: HyperparametersMixin) -> dict[str, Any]:
    """Return the items of a checkpoint that hold the hyper-parameters of `owner`."""
    stored = {name: _plain(value) for name, value in owner.hparams.items() if _is_storable(value)}
    state: dict[str, Any] = {"hyper_parameters": stored}
    left_out = [name for name, value in owner.hparams.items() if name not in stored]
    if missing := [name for name in left_out if not _is_default(owner, name, owner.hparams[name])]:
        state["hparams_left_out"] = missing
    if whole := owner.__dict__.get("_hparams_name"):
        state["hparams_name"] = whole
    return state


def arguments_from(cls: type[Any], state: dict[str, Any], given: dict[str, Any], path: Any) -> dict[str, Any]:
    """Return the arguments to make a `cls` with: those in the checkpoint `state`, replaced by those `given`.

    Raises:
        CheckpointError: an argument is missing that `cls` needs, or that the saved module was given and the
            checkpoint does not hold.
    """
    accepted = inspect.signature(cls.__init__).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    kept, left_out = state.get("hyper_parameters", {}), list(map(str, state.get("hparams_left_out", ())))
    whole = str(state.get("hparams_name", ""))
    if whole in accepted and whole not in kept and accepted[whole].kind is not inspect.Parameter.VAR_KEYWORD:
        if whole in given:
            return given
        others = {name: value for name, value in given.items() if name in kept or name in left_out}
        _check_given(cls, left_out, others, path)
        arguments = {name: value for name, value in given.items() if name not in others}
        arguments[whole] = Hyperparameters(kept | others)
    else:
        _check_given(cls, [name for name in left_out if takes_any or name in accepted], given, path)
        arguments = {name: value for name, value in kept.items() if takes_any or name in accepted} | given
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [each for each in accepted.values() if each.kind in named][1:]
    _check_given(cls, [each.name for each in wanted if each.default is each.empty], arguments, path)
    return arguments


def check_loading_options(cls: type[Any], map_location: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what Lightning's `load_from_checkpoint` takes and this one does not, unless ``__init__`` takes it.

    Raises:
        ConfigError: names the argument.
    """
    if not isinstance(map_location, str | torch.device | None):
        raise ConfigError(
            f"load_from_checkpoint got map_location={shown(map_location)}", expected='a device, such as "cuda:0"',
            do="leave it out, and move the module: weights are loaded on the CPU",
        )  # fmt: skip
    if "hparams_file" in arguments and "hparams_file" not in inspect.signature(cls.__init__).parameters:
        raise ConfigError(
            "load_from_checkpoint got hparams_file", expected="arguments of __init__", do="pass them by name"
        )


def check_weights_only(method: str, weights_only: Any) -> None:
    """Refuse ``weights_only=False``, with which torch.load and Lightning run code that a file holds."""
    if weights_only is not None and weights_only is not True:
        raise ConfigError(
            f"{method} got weights_only={weights_only!r}", expected="None or True",
            do="leave it out: code in a checkpoint is never run",
        )  # fmt: skip


def _check_given(cls: type[Any], needed: list[str], arguments: dict[str, Any], path: Any) -> None:
    missing = next((name for name in needed if name not in arguments), None)
    if missing is not None:
        raise CheckpointError(
            f"{cls.__name__} needs {missing!r}, which is not a hyper-parameter in {path}",
            expected="what save_hyperparameters() remembered and a checkpoint can hold, or an argument",
            do=f"pass {cls.__name__}.load_from_checkpoint(path, {missing}=...)",
        )


def _is_storable(value: Any) -> bool:
    """Whether a checkpoint can hold `value`."""
    from stratagem.api.json_tree import encode

    try:
        encode(_plain(value), lambda *_: 0)
    except CheckpointError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Return `value` with mappings and lists of other types, such as a configuration library's, as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    return value


def _is_default(owner: Any, name: str, value: Any) -> bool:
    """Whether `value` is the default of the argument `name`, so that another `owner` has it without being given it."""
    return any(parameters[name].default is value for parameters in _constructors(type(owner)) if name in parameters)


def _constructors(cls: type[Any]) -> Iterator[Mapping[str, inspect.Parameter]]:
    for each in cls.__mro__:
        if inspect.isfunction(constructor := vars(each).get("__init__")):
            yield inspect.signature(constructor).parameters


def _name_of(value: Any) -> str:
    """Return a name for what loggers get of `value`: of a class or function its own, otherwise of its type."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def constructor_arguments(owner: Any, frame: Any) -> dict[str, Any]:
    """Return the arguments of the running constructors of `owner`; those of a derived class replace its base's."""
    found: dict[str, Any] = {}
    frame = frame.f_back
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if not names or frame.f_locals.get(names[0]) is not owner:
            break
        if frame.f_code.co_name == "__init__":
            arguments = inspect.getargvalues(frame)
            keywords = arguments.locals.get(arguments.keywords or "", {})
            keyword_only = frame.f_code.co_varnames[len(names) : len(names) + frame.f_code.co_kwonlyargcount]
            own = {name: arguments.locals[name] for name in (*names[1:], *keyword_only) if name in arguments.locals}
            found |= own | {name: value for name, value in keywords.items() if not name.startswith("_")}
        frame = frame.f_back
    return found
