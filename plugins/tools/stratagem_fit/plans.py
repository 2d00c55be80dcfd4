"""Plan objects to build: import their classes, check arguments against the signatures, then call them."""

from __future__ import annotations

import collections.abc
import enum
import functools
import importlib
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
from attrs import frozen

from stratagem.api.options import convert, describe
from stratagem.errors import ConfigError, nearest
from stratagem_fit.admission import admit, admit_object, is_factory
from stratagem_fit.runfile import Setting, Spec, parse_text
from stratagem_fit.signatures import (
    UNNAMED,
    annotations_of,
    is_class,
    item_of,
    members,
    parameters,
    simplified,
    wants_object,
)

#: Types that cannot be made from a list or a mapping.
_SCALARS = (str, int, float, bool, complex, bytes, Path, timedelta)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@frozen(kw_only=True)
class Plan:
    """A call to make: target and checked arguments."""

    #: Its name on the command line: "model.encoder".
    path: str
    #: None if a mapping fills a dataclass that the annotation names.
    class_path: str | None
    origin: str
    target: Callable[..., Any]
    #: Converted to the types of the signature; may contain other plans.
    arguments: dict[str, Any]
    #: Where each argument was set.
    origins: dict[str, str]
    #: Arguments that were given as an import path.
    paths: dict[str, str]
    #: The receiver makes the call: pass a partial with the arguments.
    partial: bool = False

    def build(self) -> Any:
        """Make the call, inner ones first. Exceptions of user code get a note with `path`."""
        types_of = annotations_of(self.target)
        arguments = {name: _built(value) for name, value in self.arguments.items()}
        for name, value in self.arguments.items():
            if _holds_plan(value):
                arguments[name] = _convert(
                    arguments[name], types_of.get(name, Any), f"{self.path}.{name}", self.origins[name]
                )
        if self.partial:
            return functools.partial(self.target, **arguments)
        try:
            return self.target(**arguments)
        except Exception as error:
            error.add_note(f"while building {self.path} ({self.origin})")
            raise


def plan_section(path: str, spec: Spec, base: type[Any], kind: str) -> Plan:
    """Return the plan for section `path` of a run file, which must return a `base`.

    Raises:
        ConfigError: the class is missing or has another type, or arguments are invalid.
    """
    setting = spec.class_path
    target = find(setting.value, path, setting.origin)
    made = target if isinstance(target, type) else _returned(target)
    if not is_class(made) or not issubclass(made, base):
        raise ConfigError(
            f"{path} is {setting.value} ({setting.origin}), {_what(target)}",
            expected=f"a {kind}, or a function whose return annotation is one",
            do=f"annotate it: `def {target.__name__}(...) -> {kind}:`" if inspect.isfunction(target) else "",
        )
    return _plan(target, spec, path, package=target.__module__.partition(".")[0])


def find(class_path: str, path: str, origin: str) -> Any:
    """Import the object that `class_path` names. Exceptions of user modules are raised unchanged.

    Raises:
        ConfigError: there is no such module, or it has no such name.
    """
    where = f"{path} is {class_path!r} ({origin})"
    if not _DOTTED.fullmatch(class_path):
        raise ConfigError(where, expected="package.module.Class")
    module, names = _import(class_path.split("."), where)
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            raise ConfigError(
                f"{where} and {getattr(found, '__name__', type(found).__name__)} has no {name!r}",
                expected="the name of a class in it",
                do=nearest(name, [each for each in dir(found) if not each.startswith("_")]),
            )
        found = getattr(found, name)
    return found


def _import(parts: list[str], where: str) -> tuple[types.ModuleType, list[str]]:
    """Import the longest prefix of `parts` that is a module; return it, and the other parts."""
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return importlib.import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name != missing and not name.startswith(f"{missing}."):
                raise  # a missing import of the user's module
    raise ConfigError(
        f"{where} and there is no module {parts[0]!r}",
        expected="a module in the folder of the run file, in the current directory, or an installed one",
    )


def _returned(target: Any) -> Any:
    """Return the return annotation of a function; Any if there is none."""
    return annotations_of(target).get("return", Any) if inspect.isroutine(target) else Any


def _what(target: Any) -> str:
    return "a class" if isinstance(target, type) else "a function" if inspect.isroutine(target) else "an object"


# --- Arguments ---------------------------------------------------------------------------------------------------


def _plan(target: Any, spec: Spec, path: str, annotation: Any = Any, *, package: str) -> Plan:
    wanted, annotations, title = parameters(target), annotations_of(target), spec.class_path.value or target.__name__
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in wanted.values())
    named = {name: each for name, each in wanted.items() if each.kind not in UNNAMED}
    for name, value in spec.arguments.items():
        if name not in named and not takes_all:
            raise ConfigError(
                f"{path} sets {name!r} ({_origin(value)}), which {title} does not take",
                expected=", ".join(named) or "no arguments", do=nearest(name, named),
            )  # fmt: skip
    partial = is_factory(target, annotation)
    missing = [name for name, each in named.items() if each.default is each.empty and name not in spec.arguments]
    if missing and not partial:
        raise ConfigError(
            f"{path} lacks {missing[0]!r} ({spec.class_path.origin})",
            expected=f"a value, as {title} has no default for it", do=f"add it, or --{path}.{missing[0]}",
        )  # fmt: skip
    arguments = {
        name: _argument(value, annotations.get(name, Any), f"{path}.{name}", named.get(name), package)
        for name, value in spec.arguments.items()
    }
    return Plan(
        path=path, class_path=spec.class_path.value or None, origin=spec.class_path.origin, target=target,
        arguments=arguments, origins={name: _origin(value) for name, value in spec.arguments.items()},
        paths={name: value.value for name, value in spec.arguments.items() if _was_imported(value, arguments[name])},
        partial=partial,
    )  # fmt: skip


def _argument(value: Any, annotation: Any, path: str, parameter: inspect.Parameter | None, package: str) -> Any:
    """Return `value` of the run file as a plan, or converted to `annotation`."""
    if isinstance(value, Spec):
        setting = value.class_path
        target = find(setting.value, path, setting.origin)
        admit(target, annotation, package, f"{path} is {setting.value} ({setting.origin})")
        return _plan(target, value, path, annotation, package=package)
    if isinstance(value, dict | list):
        _check_container(value, annotation, path)
    if isinstance(value, dict):
        item = item_of(annotation, dict)
        return {key: _argument(each, item, f"{path}.{key}", None, package) for key, each in value.items()}
    if isinstance(value, list):
        items = _items_of(annotation, len(value))
        pairs = enumerate(zip(value, items, strict=True))
        return [_argument(each, item, f"{path}[{index}]", None, package) for index, (each, item) in pairs]
    if (filled := _dataclass_for(value, annotation)) is not None:
        given = {name: Setting(each, value.origin) for name, each in value.value.items()}
        return _plan(filled, Spec(Setting("", value.origin), given), path, package=package)
    if value.text and simplified(annotation) is Any:
        value = Setting(parse_text(value.value), value.origin)
    _check_number(value, annotation, path, parameter)
    return _converted(value, annotation, path, package)


def _items_of(annotation: Any, count: int) -> list[Any]:
    """Return the annotation of each item of a list or tuple."""
    for member in members(annotation):
        types_of_items = get_args(member)
        if get_origin(member) is tuple and Ellipsis not in types_of_items and len(types_of_items) == count:
            return list(types_of_items)
    return [item_of(annotation, list)] * count


def _check_container(value: dict[Any, Any] | list[Any], annotation: Any, path: str) -> None:
    """Refuse a list or a mapping for an argument that cannot be one, before its items are built."""
    wanted = [member for member in members(simplified(annotation)) if member is not type(None)]
    if wanted and not any(_may_hold(member, value) for member in wanted):
        kind = "a list" if isinstance(value, list) else "a mapping"
        raise ConfigError(f"{path} is {kind} ({_origin(value)})", expected=describe(simplified(annotation)))


def _may_hold(member: Any, value: dict[Any, Any] | list[Any]) -> bool:
    """Return whether an argument of type `member` may be made from a container like `value`; True if unknown."""
    if get_origin(member) is Literal or member in _SCALARS:
        return False
    if not isinstance(member, type) or member is Any:
        return True
    if issubclass(member, enum.Enum):
        return False
    return isinstance(value, dict) or issubclass(member, collections.abc.Iterable)


def _converted(setting: Setting, annotation: Any, path: str, package: str) -> Any:
    try:
        return _convert(setting.value, annotation, path, setting.origin, text=setting.text)
    except ConfigError as error:
        if isinstance(setting.value, Mapping) and wants_object(annotation):
            do = f"add --{path}.class_path package.module.Class"
            raise ConfigError(error.found, expected=error.expected, do=error.do or do) from None
        # An argument that is neither number nor text: a class, a function, torch.bfloat16.
        if not (isinstance(setting.value, str) and _DOTTED.fullmatch(setting.value) and wants_object(annotation)):
            raise
        found = _convert(find(setting.value, path, setting.origin), annotation, path, setting.origin)
        admit_object(found, annotation, package, f"{path} is {setting.value} ({setting.origin})")
        return found


def _was_imported(value: Any, argument: Any) -> bool:
    plain = (str, int, float, Path, timedelta, enum.Enum, list, tuple, dict, set, frozenset, Plan)
    return (
        isinstance(value, Setting) and isinstance(value.value, str) and not isinstance(argument, (*plain, type(None)))
    )


def _convert(value: Any, annotation: Any, path: str, origin: str, *, text: bool = False) -> Any:
    try:
        return convert(value, simplified(annotation), path, text=text)
    except ConfigError as error:
        do = error.do or _advice(value, annotation, text)
        raise ConfigError(f"{error.found} ({origin})", expected=error.expected, do=do) from None


def _check_number(setting: Setting, annotation: Any, path: str, parameter: inspect.Parameter | None) -> None:
    """Refuse ``1e-3`` of a YAML file, for an argument whose only type is a number as default: YAML reads it as text."""
    default = None if parameter is None else parameter.default
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    if is_number and simplified(annotation) is Any and (advice := _advice(setting.value, float, setting.text)):
        raise ConfigError(f"{path} is {setting.value!r} ({setting.origin})", expected="a number", do=advice)


def _advice(value: Any, annotation: Any, text: bool) -> str:
    numbers = {int, float} & set(members(simplified(annotation)))
    if text or not numbers or not isinstance(value, str):
        return ""
    try:
        number: float = float(value)
    except ValueError:
        return ""
    if not math.isfinite(number) or (float not in numbers and not number.is_integer()):
        return ""
    import yaml

    if isinstance(loaded := yaml.safe_load(value), int | float):  # it was quoted
        return f"write {value.strip() if float in numbers or isinstance(loaded, int) else int(number)} without quotes"
    number = number if float in numbers else int(number)
    return f"write {yaml.safe_dump(number).split()[0]}, as YAML reads {value} as text"


def _dataclass_for(setting: Setting, annotation: Any) -> type[Any] | None:
    """Return the dataclass or attrs class that a mapping fills, if `annotation` has one."""
    if not isinstance(setting.value, Mapping) or not all(isinstance(key, str) for key in setting.value):
        return None
    classes = [member for member in members(annotation) if isinstance(member, type)]
    return next((each for each in classes if attrs.has(each) or hasattr(each, "__dataclass_fields__")), None)


# --- Helpers -----------------------------------------------------------------------------------------------------


def _built(value: Any) -> Any:
    if isinstance(value, Plan):
        return value.build()
    if isinstance(value, dict):
        return {key: _built(each) for key, each in value.items()}
    return [_built(each) for each in value] if isinstance(value, list) else value


def _holds_plan(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_holds_plan(each) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Plan)


def _origin(value: Any) -> str:
    if isinstance(value, Setting):
        return value.origin
    if isinstance(value, Spec):
        return value.class_path.origin
    origins = [_origin(each) for each in (value.values() if isinstance(value, dict) else value)]
    return ", ".join(dict.fromkeys(origins))
