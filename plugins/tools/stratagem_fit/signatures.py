"""Read the parameters of a class or function, with annotations that `stratagem.api.options` supports."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

#: Kinds of parameters that a run file cannot name.
UNNAMED = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)

_PLAIN = (bool, int, float, str, type(None), Path, timedelta)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.abc.Sequence, collections.abc.Mapping)


def parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function; if it has no signature, one that accepts all names."""
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):
        return {"anything": inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)}


def annotations_of(target: Any) -> dict[str, Any]:
    """Return the annotation of each parameter (and ``return``) as an object; Any if it cannot be evaluated."""
    function = inspect.unwrap(_constructor(target) if isinstance(target, type) else target)
    module = getattr(function, "__module__", None) or ""
    names: dict[str, Any] = dict(vars(sys.modules[module])) if module in sys.modules else {}
    if isinstance(target, type) and target.__module__ in sys.modules:  # the __init__ of attrs has other globals
        names = vars(sys.modules[target.__module__]) | names
    raw = dict(getattr(function, "__annotations__", {}))
    return {name: _evaluated(annotation, names) for name, annotation in raw.items()}


def _constructor(cls: Any) -> Any:
    return cls.__init__ if cls.__init__ is not object.__init__ else cls.__new__


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names)["it"]
    except Exception:  # noqa: BLE001 - imported only for type checkers, or not a type
        return Any


def members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union; for another annotation, the annotation itself."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def item_of(annotation: Any, container: type[Any]) -> Any:
    """Return the annotation of the items of a list or a dict; Any if there is none, or one for each item."""
    for member in members(annotation):
        origin, arguments = get_origin(member), [each for each in get_args(member) if each is not Ellipsis]
        fits = isinstance(origin, type) and (issubclass(container, origin) or (container, origin) == (list, tuple))
        if fits and len(arguments) == (2 if container is dict else 1):
            return arguments[-1]
    return Any


def is_class(annotation: Any) -> bool:
    """Return whether ``issubclass`` accepts `annotation`."""
    return isinstance(annotation, type) and annotation is not Any  # Any is a type in Python


def simplified(annotation: Any) -> Any:
    """Return `annotation` simplified to types that `stratagem.api.options.convert` supports; Any for others."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None:
        return type(None)
    if isinstance(annotation, typing.NewType):
        return simplified(annotation.__supertype__)
    if origin in (typing.Union, types.UnionType):
        simple = tuple(simplified(member) for member in arguments)
        return Any if Any in simple else typing.Union[simple]  # noqa: UP007 - of a tuple
    if origin is Literal:
        return annotation
    if origin in _CONTAINERS:
        return origin[tuple(each if each is Ellipsis else simplified(each) for each in arguments)]
    if collections.abc.Callable in (origin, annotation):
        return collections.abc.Callable
    if origin is type:
        return type
    cls = origin if isinstance(origin, type) else annotation
    return cls if isinstance(cls, type) and _can_be_checked(cls) else Any


def _can_be_checked(cls: type[Any]) -> bool:
    """Return whether ``isinstance`` works for `cls`, and `cls` is not an abstract container, which a list may be."""
    if cls is object or getattr(cls, "_is_protocol", False) or typing.is_typeddict(cls):
        return False
    return cls in _CONTAINERS or cls.__module__ not in ("typing", "collections.abc")


def wants_object(annotation: Any) -> bool:
    """Return whether `annotation` accepts objects other than numbers, text and containers of them."""
    for member in members(simplified(annotation)):
        if member in (type, collections.abc.Callable):
            return True
        if isinstance(member, type) and member not in (*_PLAIN, *_CONTAINERS) and not issubclass(member, enum.Enum):
            return True
    return False
