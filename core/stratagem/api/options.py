"""Build classes from options, strictly: unknown keys and values of a wrong type are refused, not coerced.

In code and files a value must already have its type ("false" is not False). Text from the command line and the
environment is parsed by the option's type. In code, a value may be any Python object, such as a class or a callable.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs

from stratagem.api.paths import as_path
from stratagem.errors import ConfigError, nearest, shown

T = TypeVar("T")

#: `functools.cache`, with the types of what it wraps: mypy takes ``type[Any]`` for something that cannot be hashed.
_cached: Callable[[T], T] = functools.cache  # type: ignore[assignment]

#: What a program that runs a user's script sets in place of the script's arguments: functions of the class of the
#: settings and of the arguments by name, which return those to change.
changes: list[Callable[[type, Mapping[str, Any]], Mapping[str, Any]]] = []


# --- Building a class -------------------------------------------------------------------------------------------------


def structure(cls: type[T], values: Mapping[str, Any], path: str, *, text: bool = False) -> T:
    """Build attrs class `cls` from `values`.

    Args:
        path: where the values come from, as the user would write it (``strategy.ddp``); quoted in errors.
        text: values are text from a command line or an environment variable.

    Raises:
        ConfigError: a key that `cls` does not have, a value of the wrong type, or one that a validator refuses.
    """
    return build(cls, convert_options(cls, values, path, texts=values if text else ()), path)


def convert_options(cls: type[Any], values: Mapping[str, Any], path: str, texts: Container[str] = ()) -> dict[str, Any]:
    """Return `values` with each one converted to the type of its field on `cls`, keyed like ``__init__``.

    Args:
        texts: the names of those that are text from a command line or an environment variable.
    """
    hints = option_types(cls)
    for key in values:
        if key not in hints:
            raise _unknown(cls, key, path)
    return {key: convert(value, hints[key], _join(path, key), text=key in texts) for key, value in values.items()}


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
        found = f"the options of {path} were refused ({error})"
        raise ConfigError(found, do="change the option that it names") from error


def explain_call(cls: type[Any], values: tuple[Any, ...], given: Mapping[str, Any]) -> ConfigError | None:
    """Return the error for calling attrs class `cls` with `values` and options `given`; None if the call is valid."""
    known = options(cls)
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    if {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} != {*known}:
        return None  # its author wrote the constructor
    if unknown := [name for name in given if name not in known]:
        return _unknown(cls, unknown[0], cls.__name__)
    missing = [name for name, option in known.items() if option.default is attrs.NOTHING and name not in given]
    if values and all(each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters):
        name = next(iter([*missing, *known]), "")
        return ConfigError(
            f"{cls.__name__} was given {shown(values[0])} without a name",
            expected=f"options by name: {', '.join(known) or 'it has none'}",
            do=f"write {cls.__name__}({name}={shown(values[0])})" if name else f"write {cls.__name__}()",
        )
    return _lacks(cls, missing[0], cls.__name__) if missing and not values else None


def _unknown(cls: type[Any], key: object, path: str) -> ConfigError:
    known = options(cls)
    expected = f"one of {', '.join(sorted(known))}" if known else "no options: it has none"
    return ConfigError(f"option {_join(path, key)} is unknown", expected=expected, do=nearest(str(key), known))


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


@_cached
def options(cls: type[Any]) -> Mapping[str, attrs.Attribute[Any]]:
    """Return the fields of `cls` that a user may set, by the name that ``__init__`` gives them."""
    fields = attrs.fields(cls) if attrs.has(cls) else ()
    return {field.alias or field.name: field for field in fields if field.init}


def options_in(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mapping whose "name" chooses a plugin: those beside it, and those in "init_args" if any.

    An option that is itself called ``name`` can only be in the latter.
    """
    beside = {key: value for key, value in chosen.items() if key != "name"}
    inner = beside.pop("init_args") if isinstance(beside.get("init_args"), Mapping) else {}
    return {**beside, **inner}


@_cached
def option_types(cls: type[Any]) -> Mapping[str, Any]:
    """Return the type of each option of `cls`, as an object."""
    return {name: _resolve(cls, field) for name, field in options(cls).items()}


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


# --- Converting a value -----------------------------------------------------------------------------------------------


def convert(value: Any, annotation: Any, path: str, *, text: bool = False) -> Any:
    """Return `value` as `annotation`, or raise a ConfigError that quotes `path` and `value`."""
    try:
        return _conversion(text)(_sized(value), annotation)
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


def _sized(value: Any) -> Any:
    """Return `value`; refuse integers that do not fit into 64 bits, also inside containers."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        for each in [*value, *(value.values() if isinstance(value, dict) else ())]:
            _sized(each)
    elif isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"an integer of {value.bit_length()} bits", expected="integers of at most 63 bits")
    return value


def describe(annotation: Any) -> str:
    """Return a type in words, for messages: ``a number or None``, ``'min' or 'max'``."""
    kind = get_origin(annotation) or annotation
    if kind in (Literal, *_UNIONS):
        return " or ".join(map(repr if kind is Literal else describe, get_args(annotation)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(repr(member.value) for member in kind)
    return _IN_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")


@functools.cache
def _conversion(text: bool) -> Callable[[Any, Any], Any]:
    """Return what converts a value to a type. It coerces nothing: `text` is parsed as the type says, then checked."""
    import cattrs

    converter = cattrs.Converter(detailed_validation=False)

    def container(value: Any, annotation: Any) -> Any:
        kind, items = get_origin(annotation) or annotation, get_args(annotation) or (Any,)
        make = _CONTAINERS[kind]
        accepts = {list: (list, tuple), tuple: (list, tuple), dict: Mapping}.get(make, (list, tuple, set, frozenset))
        values = _instance(_parse_container(value, make) if text and isinstance(value, str) else value, accepts)
        if make is dict:
            values, items = values.items(), (tuple[items],)  # type: ignore[valid-type]
        if kind is not tuple or len(items) < 2 or ... in items:
            items = items[:1] * len(values)
        return make(converter.structure(*each) for each in [*zip(values, items, strict=True)])  # refuses other lengths

    def union(value: Any, annotation: Any) -> Any:
        refusal: Exception = TypeError(value)
        # Exact types first: True must not become 1 in `int | bool`, nor "2" text in `int | str`.
        for member in sorted(get_args(annotation), key=lambda member: (member is str, type(value) is not member)):
            try:
                return converter.structure(value, member)
            except Exception as error:  # noqa: BLE001 - another member may fit
                refusal = error if isinstance(error, ConfigError) else refusal  # which tells more
        raise refusal

    def literal(value: Any, annotation: Any) -> Any:
        for choice in get_args(annotation):
            same_text = isinstance(value, str) and value.lower() == str(choice).lower()
            if (type(choice) is type(value) and choice == value) or (same_text and (text or isinstance(choice, str))):
                return choice
        raise ValueError(value)

    hooks: list[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]]] = [
        (lambda t: t is not Any and (isinstance(t, type) or get_origin(t) in (type, Callable)), _instance),
        (lambda t: isinstance(t, type) and issubclass(t, enum.Enum), _member),
        (lambda t: (get_origin(t) or t) in _CONTAINERS, container),
        (lambda t: get_origin(t) is Literal, literal),
        (lambda t: get_origin(t) in _UNIONS, union),
    ]
    for predicate, hook in hooks:  # cattrs tries the last registered first
        converter.register_structure_hook_func(predicate, hook)
    converter.register_structure_hook(Path, _path)
    for kind in _PARSE:
        converter.register_structure_hook(kind, functools.partial(_plain, kind, text))
    return converter.structure


def _plain(kind: type, text: bool, value: Any, _: Any = None) -> Any:
    if text and isinstance(value, str):
        value = _PARSE[kind](value)
    if kind is timedelta:
        return value if isinstance(value, timedelta) else timedelta(seconds=_plain(float, False, value))
    if kind is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
        return float(value)
    _require(type(value) is kind and not (kind is str and "\0" in str(value)))
    return value


def _path(value: Any, _: Any) -> Path:
    return as_path(value if hasattr(value, "fs") else _instance(value, (str, os.PathLike)))  # a UPath has one


def _member(value: Any, annotation: type[enum.Enum]) -> enum.Enum:
    for choice in annotation:
        words = (choice.name.lower(), str(choice.value).lower())
        if isinstance(value, str) and not isinstance(value, annotation) and value.lower() in words:
            return choice
    return annotation(value)


def _instance(value: Any, annotation: Any) -> Any:
    _require(isinstance(value, get_origin(annotation) or annotation))
    return value


def _require(condition: bool) -> None:
    if not condition:
        raise TypeError


def _parse_container(text: str, make: Any) -> Any:
    """Parse JSON, or ``a,b,c`` for a list."""
    if text.strip()[:1] in "[{":
        return json.loads(text.strip())
    _require(make is not dict)
    return [part.strip() for part in text.split(",") if part.strip()]


_NAMED = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
#: How text is parsed; any exception refuses it.
_PARSE: dict[type, Callable[[str], Any]] = {
    bool: lambda text: _NAMED[text.strip().lower()],
    int: lambda text: _sized(int(re.fullmatch(r"[+-]?\d+", text.strip()).group())),  # type: ignore[union-attr]
    float: float, timedelta: float, str: lambda text: text,
    type(None): lambda text: {"none": None, "null": None}[text.strip().lower()],
}  # fmt: skip
#: What is made for each annotation of a container.
_CONTAINERS: Any = {Sequence: list, Mapping: dict} | {kind: kind for kind in (list, tuple, set, frozenset, dict)}
_UNIONS = (Union, types.UnionType)
_IN_WORDS: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "None", Any: "anything",
    timedelta: "seconds or a timedelta", Path: "a path", Callable: "a callable", set: "a set", frozenset: "a set",
    list: "a list", tuple: "a list", Sequence: "a list", dict: "a mapping", Mapping: "a mapping",
}  # fmt: skip


def options_key(plugin: Any) -> str:
    """Return the options of `plugin` that differ from their defaults, as " " and JSON; "" if there are none."""
    changed = {}
    for name, option in options(type(plugin)).items():
        value = getattr(plugin, option.name, None)
        value = str(value) if isinstance(value, Path) else value
        if (value is None or isinstance(value, bool | int | float | str)) and value != option.default:
            changed[name] = redact(name, value)
    return f" {json.dumps(changed, sort_keys=True)}" if changed else ""


# --- Lists ------------------------------------------------------------------------------------------------------------


def is_list(value: Any) -> bool:
    """Whether `value` is a list of any type, such as a configuration library's."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_list(value: Any) -> list[Any]:
    """Return the items of a list, or anything else as the only item."""
    return list(value) if is_list(value) else [value]


# --- Secrets ----------------------------------------------------------------------------------------------------------


REDACTED = "<redacted>"

_SECRET_NAME = re.compile(r"(?i)(^|[_.-])(token|apikey|keys?|secrets?|pass(word|wd|phrase)|credentials?|auth)($|[_.-])")
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
    if isinstance(value, str):
        return REDACTED if value and _SECRET_NAME.search(name) else _URL_PASSWORD.sub(rf"\1:{REDACTED}", value)
    return value
