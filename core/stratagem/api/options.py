"""Build classes from options, strictly: unknown keys and values of a wrong type are refused, not coerced.

In code and files a value must already have its type ("false" is not False). Text from the command line and the
environment is parsed by the option's type. In code, a value may be any Python object, such as a class or a callable.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import json
import math
import os
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import attrs

from stratagem.api.paths import as_path
from stratagem.errors import ConfigError, nearest, shown

if TYPE_CHECKING:
    import cattrs

T = TypeVar("T")

#: What a program that runs a user's script sets in place of the script's arguments: functions of the class of the
#: settings and of the arguments by name, which return those to change.
changes: list[Callable[[type, Mapping[str, Any]], Mapping[str, Any]]] = []

#: The largest int64, which is torch's largest integer.
_LARGEST = 2**63 - 1
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


# --- Building a class --------------------------------------------------------------------------------------------


def structure(cls: type[T], values: Mapping[str, Any], path: str, *, text: bool = False) -> T:
    """Build attrs class `cls` from `values`.

    Args:
        path: where the values come from, as the user would write it (``strategy.ddp``); quoted in errors.
        text: values are text from a command line or an environment variable.

    Raises:
        ConfigError: a key that `cls` does not have, a value of the wrong type, or one that a validator refuses.
    """
    return build(cls, convert_options(cls, values, path, text=text), path)


def convert_options(cls: type[Any], values: Mapping[str, Any], path: str, *, text: bool = False) -> dict[str, Any]:
    """Return `values` with each one converted to the type of its field on `cls`, keyed like ``__init__``."""
    fields = options(cls)
    for key in values:
        if key not in fields:
            raise _unknown(cls, key, path)
    hints = option_types(cls)
    return {key: convert(value, hints[key], _join(path, key), text=text) for key, value in values.items()}


def build(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Return `cls` called with converted `values`; errors of its validators become ConfigErrors with the path."""
    for name, option in options(cls).items():
        if option.default is attrs.NOTHING and name not in values:
            raise _lacks(cls, name, path)
    try:
        return cls(**values)
    except ConfigError as error:
        prefix = f"{cls.__name__}."  # `stratagem.api.validators` write the class, as they do not know the path
        if not error.found.startswith(prefix):
            raise
        found = _join(path, error.found.removeprefix(prefix))
        raise ConfigError(found, expected=error.expected, do=error.do) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the options of {path} were refused ({error})", do="change the option that it names"
        ) from error


def explain_call(cls: type[Any], values: tuple[Any, ...], given: Mapping[str, Any]) -> ConfigError | None:
    """Return the error for calling attrs class `cls` with `values` and options `given`; None if the call is valid."""
    known = options(cls)
    try:
        every = inspect.signature(cls.__init__).parameters
        parameters = {name: each for name, each in every.items() if each.kind is not each.VAR_KEYWORD}
    except (TypeError, ValueError):
        return None
    if not attrs.has(cls) or set(parameters) != {"self", *known}:
        return None  # its author wrote the constructor
    if unknown := next((name for name in given if name not in known), None):
        return _unknown(cls, unknown, cls.__name__)
    missing = [name for name, option in known.items() if option.default is attrs.NOTHING and name not in given]
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    if values and not positional:
        name = next(iter([*missing, *known]), "")
        return ConfigError(
            f"{cls.__name__} was given {shown(values[0])} without a name",
            expected=f"options by name: {', '.join(known) or 'it has none'}",
            do=f"write {cls.__name__}({name}={shown(values[0])})" if name else f"write {cls.__name__}()",
        )
    return _lacks(cls, missing[0], cls.__name__) if missing and not values else None


def _unknown(cls: type[Any], key: object, path: str) -> ConfigError:
    known = options(cls)
    return ConfigError(
        f"option {_join(path, key)} is unknown",
        expected=f"one of {', '.join(sorted(known))}" if known else "no options: it has none",
        do=nearest(str(key), known),
    )


def _lacks(cls: type[Any], name: str, path: str) -> ConfigError:
    _, dot, plugin = path.partition(".")
    example = f'{{"name": "{plugin}", "{name}": ...}}'
    return ConfigError(
        f"{path} lacks the option {name!r}", expected=f"{describe(option_types(cls)[name])}; it has no default",
        do=f"write {example} where you chose {plugin!r}" if dot else f"write {path}({name}=...)",
    )  # fmt: skip


def check(instance: Any, path: str) -> None:
    """Check the options of an instance that the user built in code; attrs itself does not look at types.

    Paths and durations are converted as in a mapping of options: ``~`` is expanded, 60 becomes one minute.
    """
    hints = option_types(type(instance))
    for name, option in options(type(instance)).items():
        value = getattr(instance, option.name)
        converted = convert(value, hints[name], _join(path, name))
        if isinstance(converted, Path | timedelta) and (type(converted), converted) != (type(value), value):
            setattr(instance, option.name, converted)


def options(cls: type[Any]) -> Mapping[str, attrs.Attribute[Any]]:
    """Return the fields of `cls` that a user may set, by the name that ``__init__`` gives them."""
    if (found := _OPTIONS.get(cls)) is None:
        fields = attrs.fields(cls) if attrs.has(cls) else ()
        found = _OPTIONS[cls] = {field.alias or field.name: field for field in fields if field.init}
    return found


#: Caches of `options` and `option_types`, which are called several times for each chosen plugin.
_OPTIONS: weakref.WeakKeyDictionary[type[Any], Mapping[str, attrs.Attribute[Any]]] = weakref.WeakKeyDictionary()
_TYPES: weakref.WeakKeyDictionary[type[Any], Mapping[str, Any]] = weakref.WeakKeyDictionary()


def options_in(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mapping whose "name" chooses a plugin: those beside it, and those in "init_args" if any.

    An option that is itself called ``name`` can only be in the latter.
    """
    beside = {key: value for key, value in chosen.items() if key != "name"}
    inner = beside.pop("init_args") if isinstance(beside.get("init_args"), Mapping) else {}
    return {**beside, **inner}


def option_types(cls: type[Any]) -> Mapping[str, Any]:
    """Return the type of each option of `cls`, as an object."""
    if (found := _TYPES.get(cls)) is None:
        found = _TYPES[cls] = {name: _resolve(cls, field) for name, field in options(cls).items()}
    return found


def _resolve(cls: type[Any], field: attrs.Attribute[Any]) -> Any:
    """Return the field's annotation as an object; `Any` for a name that is imported only for type checkers."""
    if not isinstance(field.type, str):
        return Any if field.type is None else field.type
    owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
    try:
        return eval(field.type, vars(sys.modules[owner.__module__]))  # noqa: S307 - the plugin's own source
    except NameError:
        return Any


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


# --- Converting a value ------------------------------------------------------------------------------------------


def convert(value: Any, annotation: Any, path: str, *, text: bool = False) -> Any:
    """Return `value` as `annotation`, or raise a ConfigError that quotes `path` and `value`."""
    try:
        _check_size(value)
        return (_from_text if text else _from_code)().structure(value, annotation)
    except ConfigError as error:
        if error.found.startswith(path):
            raise
        raise ConfigError(f"{path} is {shown(value)}: {error.found}", expected=error.expected, do=error.do) from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", expected=describe(annotation)) from None
    except Exception as error:
        raise ConfigError(f"{path} is {shown(value)}", expected=_expected(value, annotation)) from error


def _expected(value: Any, annotation: Any) -> str:
    if isinstance(value, str) and "\0" in value:
        return f"{describe(annotation)}, without NUL characters"
    infinite = isinstance(value, int | float) and math.isinf(value)
    return describe(annotation).replace("a number", "a finite number" if infinite else "a number")


def _check_size(value: Any) -> None:
    """Refuse integers that do not fit into 64 bits, also inside containers."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        for each in [*value, *(value.values() if isinstance(value, dict) else ())]:
            _check_size(each)
    elif isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ConfigError(f"an integer of {value.bit_length()} bits", expected="integers of at most 63 bits")


def describe(annotation: Any) -> str:
    """Return a type in words, for messages: ``a number or None``, ``'min' or 'max'``."""
    if annotation is Any:
        return "anything"
    if get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in get_args(annotation))
    if _is_union(annotation):
        return " or ".join(describe(member) for member in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(repr(member.value) for member in annotation)
    plain = get_origin(annotation) or annotation
    names = {
        bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "None",
        timedelta: "seconds or a timedelta", Path: "a path", collections.abc.Callable: "a callable",
        list: "a list", tuple: "a list", dict: "a mapping", collections.abc.Mapping: "a mapping",
        collections.abc.Sequence: "a list", set: "a set", frozenset: "a set",
    }  # fmt: skip
    return names.get(plain, f"a {getattr(plain, '__name__', plain)}")


@cache
def _from_code() -> cattrs.Converter:
    converter = _passthrough_converter()
    converter.register_structure_hook(bool, _exactly(bool))
    converter.register_structure_hook(int, _exactly(int))
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(type(None), _exactly(type(None)))
    converter.register_structure_hook(timedelta, lambda value, _: _seconds(value))
    return converter


@cache
def _from_text() -> cattrs.Converter:
    converter = _passthrough_converter(parse=_parse_container)
    converter.register_structure_hook(bool, lambda value, _: _parse_bool(value))
    converter.register_structure_hook(int, lambda value, _: _parse_int(value))
    converter.register_structure_hook(float, lambda value, _: _number(_parse_number(value), float))
    converter.register_structure_hook(type(None), lambda value, _: _parse_none(value))
    converter.register_structure_hook(timedelta, lambda value, _: _seconds(_parse_number(value)))
    return converter


def _path(value: Any) -> Path:
    return as_path(value if hasattr(value, "fs") else _instance(value, (str, os.PathLike)))  # a UPath has one


def _passthrough_converter(parse: Callable[[Any, tuple[type, ...]], Any] | None = None) -> cattrs.Converter:
    """Return a converter that checks containers, unions and instances of other classes, and does not coerce them.

    `parse` turns text into a container before it is checked.
    """
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook(str, lambda value, _: _text(value))
    converter.register_structure_hook(Path, lambda value, _: _path(value))

    def container(accepts: tuple[type, ...], make: Callable[[Any], Any], value: Any, item: Any) -> Any:
        checked = _instance(parse(value, accepts) if parse else value, accepts)
        return make(checked if item is Any else [converter.structure(each, item) for each in checked])

    def sequence(value: Any, annotation: Any) -> Any:
        arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        plain = get_origin(annotation) or annotation
        if plain is tuple and len(arguments) > 1 and Ellipsis not in get_args(annotation):
            values = _instance(parse(value, (list, tuple)) if parse else value, (list, tuple))
            _require(len(values) == len(arguments))
            return tuple(converter.structure(each, item) for each, item in zip(values, arguments, strict=True))
        accepts, make = _SEQUENCES[plain]
        return container(accepts, make, value, arguments[0] if arguments else Any)

    def mapping(value: Any, annotation: Any) -> Any:
        key_type, item_type = get_args(annotation) or (Any, Any)
        checked = _instance(parse(value, (dict,)) if parse else value, (dict, collections.abc.Mapping))
        return {converter.structure(k, key_type): converter.structure(v, item_type) for k, v in checked.items()}

    def union(value: Any, annotation: Any) -> Any:
        members, refusal = get_args(annotation), None
        # Exact types first: True must not become 1 in `int | bool`, nor "2" text in `int | str`.
        for member in sorted(members, key=lambda member: (member is str, type(value) is not member)):
            try:
                return converter.structure(value, member)
            except ConfigError as error:  # more specific than "the type is wrong"
                refusal = error
            except Exception:  # noqa: BLE001, S112 - another member may fit
                continue
        raise refusal or TypeError(value)

    def literal(value: Any, annotation: Any) -> Any:
        for choice in get_args(annotation):
            same = type(choice) is type(value) and choice == value
            same_text = isinstance(value, str) and value.lower() == str(choice).lower()
            if same or (same_text and (parse or isinstance(choice, str))):
                return choice
        raise ValueError(value)

    def member(value: Any, annotation: type[enum.Enum]) -> enum.Enum:
        if isinstance(value, annotation):
            return value
        for choice in annotation:
            if isinstance(value, str) and value.lower() in (choice.name.lower(), str(choice.value).lower()):
                return choice
        return annotation(value)

    def foreign(value: Any, annotation: Any) -> Any:
        return _instance(value, get_origin(annotation) or annotation)

    hooks: list[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]]] = [
        (lambda t: isinstance(t, type) and t not in _PLAIN, foreign),
        (lambda t: isinstance(t, type) and issubclass(t, enum.Enum), member),
        (lambda t: (get_origin(t) or t) is type, foreign),
        (lambda t: (get_origin(t) or t) in _SEQUENCES or get_origin(t) is tuple, sequence),
        (lambda t: (get_origin(t) or t) in (dict, collections.abc.Mapping), mapping),
        (lambda t: (get_origin(t) or t) is collections.abc.Callable, lambda value, _: _callable(value)),
        (lambda t: get_origin(t) is Literal, literal),
        (_is_union, union),
        (lambda t: t is Any, lambda value, _: value),
    ]
    for predicate, hook in hooks:  # cattrs tries the last registered first
        converter.register_structure_hook_func(predicate, hook)
    return converter


_PLAIN = (bool, int, float, str, type(None), timedelta, Path)
_SEQUENCES: dict[Any, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
    list: ((list, tuple), list),
    tuple: ((list, tuple), tuple),
    collections.abc.Sequence: ((list, tuple), list),
    set: ((set, frozenset, list, tuple), set),
    frozenset: ((set, frozenset, list, tuple), frozenset),
}


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def _require(condition: bool) -> None:
    if not condition:
        raise TypeError


def _instance(value: Any, accepts: Any) -> Any:
    _require(isinstance(value, accepts))
    return value


def _exactly(kind: type) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        _require(type(value) is kind)
        return value

    return hook


def _text(value: Any) -> str:
    _require(type(value) is str and "\0" not in value)
    return str(value)


def _callable(value: Any) -> Any:
    _require(callable(value))
    return value


def _number(value: Any, _: Any = float) -> float:
    _require(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
    return float(value)


def _seconds(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    return timedelta(seconds=_number(value))


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    lowered = _instance(value, str).strip().lower()
    _require(lowered in _TRUE | _FALSE)
    return lowered in _TRUE


def _parse_int(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        _check_size(int(value))
        return int(value)
    _require(type(value) is int)
    return int(value)


def _parse_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _parse_none(value: Any) -> None:
    _require(value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")))


def _parse_container(value: Any, accepts: tuple[type, ...]) -> Any:
    """Parse JSON, or ``a,b,c`` for a list."""
    if not isinstance(value, str):
        return value
    stripped = value.strip()
    if stripped[:1] in "[{":
        return json.loads(stripped)
    _require(dict not in accepts)
    return [part.strip() for part in stripped.split(",") if part.strip()]


def options_key(plugin: Any) -> str:
    """Return the options of `plugin` that differ from their defaults, as " " and JSON; "" if there are none."""
    changed = {}
    for name, option in options(type(plugin)).items():
        value = getattr(plugin, option.name, None)
        if isinstance(value, Path):
            value = str(value)
        if (value is None or isinstance(value, bool | int | float | str)) and value != option.default:
            changed[name] = redact(name, value)
    return f" {json.dumps(changed, sort_keys=True)}" if changed else ""


# --- Lists and mappings -----------------------------------------------------------------------------------------------


def is_list(value: Any) -> bool:
    """Whether `value` is a list of any type, such as a configuration library's."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_list(value: Any) -> list[Any]:
    """Return the items of a list, or anything else as the only item."""
    return list(value) if is_list(value) else [value]


# --- Secrets ----------------------------------------------------------------------------------------------------------


REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(token|key|keys|apikey|secret|secrets|password|passwd|passphrase|credential|credentials|auth)(?:$|[_\-.])",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)(?=@)")


def redact(name: str, value: Any) -> Any:
    """Return `value`, or what may be shown of it.

    A value whose name has a part such as ``token``, ``key`` or ``password`` is replaced unless it is empty or a number
    or flag; in any other text the password of a URL is. Containers are looked into.
    """
    if isinstance(value, dict):
        return {key: redact(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redact(name, item) for item in value])
    if not isinstance(value, str):
        return value
    if value and _SECRET_NAME.search(name):
        return REDACTED
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}", value)
