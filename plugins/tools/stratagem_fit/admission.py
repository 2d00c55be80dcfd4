"""Decide what a run file may call, from classes and annotations, before anything is called.

A class is allowed if the argument is annotated with it or a base class of it. A function is allowed if its return
annotation is such a class. An argument without an annotation accepts the classes of `_KINDS`, and classes of the
package that the class of the section is from.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
from typing import Any, get_args, get_origin

from stratagem.api.options import describe
from stratagem.errors import ConfigError
from stratagem_fit.signatures import annotations_of, is_class, members, simplified

#: Classes whose objects an argument without an annotation accepts.
_KINDS = (
    "torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler", "torch.utils.data.Dataset",
    "torch.utils.data.Sampler", "torch.utils.data.DataLoader", "stratagem_trainer.datamodule.DataModule",
    "stratagem.api.kinds.Plugin",
)  # fmt: skip
#: Modules whose functions may be passed to an argument for a callable: they have no side effects.
_FUNCTIONS = ("math", "torch", "torch.nn.functional", "torch.nn.init")


def admit(target: Any, annotation: Any, package: str, found: str) -> None:
    """Refuse to call `target` for an argument with `annotation` unless the argument accepts the result.

    Args:
        package: the top-level package of the class of the section.
        found: the argument, its value and where it was set; the start of the error message.

    Raises:
        ConfigError: the argument does not accept it.
    """
    if not callable(target):
        raise ConfigError(f"{found}, which cannot be called", expected="a class or a function")
    wanted = [member for member in members(annotation) if member not in (None, type(None))]
    if any(_admits(member, target, package) for member in wanted):
        return
    raise _refusal(target, annotation, wanted, package, found)


def admit_object(value: Any, annotation: Any, package: str, found: str) -> None:
    """Refuse `value`, a class or function that is passed rather than called, unless the argument accepts it."""
    if not isinstance(value, type) and not inspect.isroutine(value):
        return
    wanted = [member for member in members(annotation) if member not in (None, type(None))]
    for member in wanted:
        if get_origin(member) is type:
            kind = (get_args(member) or (Any,))[0]
            if isinstance(value, type) and (not is_class(kind) or issubclass(value, kind)):
                return
        elif _is_callable(member) and (_is_factory(value, member) if isinstance(value, type) else True):
            if _may_be_called_by_receiver(value, member, package):
                return
        elif simplified(member) in (Any, type):
            return
    raise _refusal(value, annotation, wanted, package, found)


def is_factory(target: Any, annotation: Any) -> bool:
    """Return whether `annotation` is a callable and `target` itself is passed for it, to be called by the receiver.

    So for a function, for the class T of ``Callable[..., T]``, and for a class whose instances are not callable.
    """
    return any(_is_callable(member) and _is_factory(target, member) for member in members(annotation))


def _is_factory(target: Any, member: Any) -> bool:
    if not isinstance(target, type) or not issubclass(target, collections.abc.Callable):  # type: ignore[arg-type]
        return True
    returned = _returned(member)
    return is_class(returned) and issubclass(target, returned)


def _admits(member: Any, target: Any, package: str) -> bool:
    """Return whether an argument of type `member` (of a union) accepts the result of `target`, or `target` itself."""
    if _is_callable(member):
        if _is_factory(target, member):
            return _may_be_called_by_receiver(target, member, package)
        return _is_listed(target, package)  # a class with callable instances
    made = target if isinstance(target, type) else annotations_of(target).get("return", Any)
    if not is_class(made):
        return False
    plain = simplified(member)
    if plain is Any:
        return _is_listed(made, package)
    return is_class(plain) and issubclass(made, plain)


def _may_be_called_by_receiver(target: Any, member: Any, package: str) -> bool:
    """Return whether `target` matches ``Callable[..., T]``, or ``Callable``, as far as is known without calling it."""
    wanted = _returned(member)
    if isinstance(target, type):
        return issubclass(target, wanted) if is_class(wanted) else _is_listed(target, package)
    returned = annotations_of(target).get("return", Any)
    if is_class(returned) and is_class(wanted):
        return issubclass(returned, wanted)
    module = getattr(target, "__module__", None) or ""
    own = module.partition(".")[0] == package
    return own or (inspect.isroutine(target) and (module in _FUNCTIONS or module.startswith("torch._C.")))


def _is_listed(cls: type[Any], package: str) -> bool:
    kinds = tuple(getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in _KINDS)
    return cls.__module__.partition(".")[0] == package or issubclass(cls, kinds)


def _is_callable(member: Any) -> bool:
    return collections.abc.Callable in (member, get_origin(member))


def _returned(member: Any) -> Any:
    return (get_args(member) or (Any,))[-1]


def _refusal(target: Any, annotation: Any, wanted: list[Any], package: str, found: str) -> ConfigError:
    is_type = isinstance(target, type)
    untyped = not wanted or any(simplified(member) is Any for member in wanted)
    if not untyped:
        names = [_described(member) for member in members(annotation)]
        return ConfigError(
            found, expected=" or ".join(names),
            do="" if is_type else "use a class, or a function with such a return annotation",
        )  # fmt: skip
    kinds = ", ".join(path.rpartition(".")[2] for path in _KINDS)
    annotate = "annotate the argument with its class"
    return ConfigError(
        f"{found} and the annotation of the argument does not allow it",
        expected=f"a {kinds}, or a class of the package {package}",
        do=annotate if is_type else f"{annotate}, and the function with its return type",
    )


def _described(member: Any) -> str:
    """Describe an annotation for an error message."""
    inner = _returned(member) if _is_callable(member) else (get_args(member) or (Any,))[0]
    if _is_callable(member):
        return f"a callable that returns {describe(inner)}" if is_class(inner) else "a callable"
    if get_origin(member) is type and is_class(inner):
        return f"a class derived from {inner.__name__}"
    return describe(simplified(member))
