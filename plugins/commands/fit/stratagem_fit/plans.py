"""Objects that are yet to be built: find their classes, check their arguments against the signature, then call."""

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
from stratagem_fit.runfile import Said, Spec, parse_text
from stratagem_fit.signatures import (
    UNNAMED,
    annotations_of,
    in_plain_words,
    is_class,
    item_of,
    members,
    parameters,
    wants_object,
)

#: What no list and no mapping can become.
_SCALARS = (str, int, float, bool, complex, bytes, Path, timedelta)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@frozen(kw_only=True)
class Plan:
    """A call that is yet to be made."""

    #: Where it stands, as the command line would name it: "model.encoder".
    path: str
    #: None where a mapping fills a dataclass: the annotation names the class.
    class_path: str | None
    origin: str
    target: Callable[..., Any]
    #: Converted to what the signature says; may hold further plans.
    arguments: dict[str, Any]
    #: Who said which argument.
    origins: dict[str, str]
    #: Arguments that were given as the path of an object.
    paths: dict[str, str]
    #: The argument wants something to call: keep the arguments for that call.
    partial: bool = False

    def build(self) -> Any:
        """Make the call, inner ones first. What the user's own code raises gets a note that says where this was."""
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
    """Return the plan for section `path` of a run file, which must become a `base`.

    Raises:
        ConfigError: the class is not there, or is another kind of thing; arguments that do not fit it.
    """
    said = spec.class_path
    target = find(said.value, path, said.origin)
    made = target if isinstance(target, type) else _returned(target)
    if not is_class(made) or not issubclass(made, base):
        raise ConfigError(
            f"{path} is {said.value} ({said.origin}), {_what(target)}",
            expected=f"a {kind}, or a function whose return annotation is one",
            do=f"annotate it: `def {target.__name__}(...) -> {kind}:`" if inspect.isfunction(target) else "",
        )
    return _plan(target, spec, path, package=target.__module__.partition(".")[0])


def find(class_path: str, path: str, origin: str) -> Any:
    """Import what `class_path` names. An error within the module is the user's own and is raised as it is.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    where = f"{path} is {class_path!r} ({origin})"
    if not _DOTTED.fullmatch(class_path):
        raise ConfigError(where, expected="package.module.Class")
    module, names = _import(class_path.split("."), where)
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            raise ConfigError(
                f"{where} and {getattr(found, '__name__', found)} has no {name!r}",
                expected="the name of a class in it",
                do=nearest(name, [each for each in dir(found) if not each.startswith("_")]),
            )
        found = getattr(found, name)
    return found


def _import(parts: list[str], where: str) -> tuple[types.ModuleType, list[str]]:
    """Import the longest beginning of `parts` that is a module; return it, and the rest of `parts`."""
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return importlib.import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name != missing and not name.startswith(f"{missing}."):
                raise  # a module that the user's module imports
    raise ConfigError(
        f"{where} and there is no module {parts[0]!r}",
        expected="a module beside the run file, in the current directory, or an installed one",
    )


def _returned(target: Any) -> Any:
    """Return the annotation of what a function returns; Any where there is none."""
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
    """Return `value` of the run file as the plan of an object, or as what `annotation` says."""
    if isinstance(value, Spec):
        said = value.class_path
        target = find(said.value, path, said.origin)
        admit(target, annotation, package, f"{path} is {said.value} ({said.origin})")
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
        given = {name: Said(each, value.origin) for name, each in value.value.items()}
        return _plan(filled, Spec(Said("", value.origin), given), path, package=package)
    if value.text and in_plain_words(annotation) is Any:
        value = Said(parse_text(value.value), value.origin)
    _check_number(value, annotation, path, parameter)
    return _converted(value, annotation, path, package)


def _items_of(annotation: Any, count: int) -> list[Any]:
    """Return the annotations of the items of a list: of a tuple with a type for each place, those."""
    for member in members(annotation):
        places = get_args(member)
        if get_origin(member) is tuple and Ellipsis not in places and len(places) == count:
            return list(places)
    return [item_of(annotation, list)] * count


def _check_container(value: dict[Any, Any] | list[Any], annotation: Any, path: str) -> None:
    """Refuse a list or a mapping for an argument that cannot be one, before any of its items is built."""
    wanted = [member for member in members(in_plain_words(annotation)) if member is not type(None)]
    if wanted and not any(_may_hold(member, value) for member in wanted):
        kind = "a list" if isinstance(value, list) else "a mapping"
        raise ConfigError(f"{path} is {kind} ({_origin(value)})", expected=describe(in_plain_words(annotation)))


def _may_hold(member: Any, value: dict[Any, Any] | list[Any]) -> bool:
    """Whether an argument of type `member` may become of a container like `value`; of unknown ones, yes."""
    if get_origin(member) is Literal or member in _SCALARS:
        return False
    if not isinstance(member, type) or member is Any:
        return True
    if issubclass(member, enum.Enum):
        return False
    return isinstance(value, dict) or issubclass(member, collections.abc.Iterable)


def _converted(said: Said, annotation: Any, path: str, package: str) -> Any:
    try:
        return _convert(said.value, annotation, path, said.origin, text=said.text)
    except ConfigError:
        # What neither a number nor a text can be: a class, a function, torch.bfloat16.
        if not (isinstance(said.value, str) and _DOTTED.fullmatch(said.value) and wants_object(annotation)):
            raise
        found = _convert(find(said.value, path, said.origin), annotation, path, said.origin)
        admit_object(found, annotation, package, f"{path} is {said.value} ({said.origin})")
        return found


def _was_imported(value: Any, argument: Any) -> bool:
    plain = (str, int, float, Path, timedelta, enum.Enum, list, tuple, dict, set, frozenset, Plan)
    return isinstance(value, Said) and isinstance(value.value, str) and not isinstance(argument, (*plain, type(None)))


def _convert(value: Any, annotation: Any, path: str, origin: str, *, text: bool = False) -> Any:
    try:
        return convert(value, in_plain_words(annotation), path, text=text)
    except ConfigError as error:
        do = error.do or _advice(value, annotation, text)
        raise ConfigError(f"{error.found} ({origin})", expected=error.expected, do=do) from None


def _check_number(said: Said, annotation: Any, path: str, parameter: inspect.Parameter | None) -> None:
    """Refuse ``1e-3`` of a YAML file, which is text there, for an argument whose default alone says it is a number."""
    default = None if parameter is None else parameter.default
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    if is_number and in_plain_words(annotation) is Any and (advice := _advice(said.value, float, said.text)):
        raise ConfigError(f"{path} is {said.value!r} ({said.origin})", expected="a number", do=advice)


def _advice(value: Any, annotation: Any, text: bool) -> str:
    numbers = {int, float} & set(members(in_plain_words(annotation)))
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
    return f"write {yaml.safe_dump(number).split()[0]}, as YAML takes {value} for text"


def _dataclass_for(said: Said, annotation: Any) -> type[Any] | None:
    """Return the dataclass (or attrs class) that a mapping is meant to fill."""
    if not isinstance(said.value, Mapping) or not all(isinstance(key, str) for key in said.value):
        return None
    classes = [member for member in members(annotation) if isinstance(member, type)]
    return next((each for each in classes if attrs.has(each) or hasattr(each, "__dataclass_fields__")), None)


# --- Small things ------------------------------------------------------------------------------------------------


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
    if isinstance(value, Said):
        return value.origin
    if isinstance(value, Spec):
        return value.class_path.origin
    origins = [_origin(each) for each in (value.values() if isinstance(value, dict) else value)]
    return ", ".join(dict.fromkeys(origins))
