"""What a run file may have called: decided from classes and annotations, before anything is called.

A class is admitted where its argument is annotated with it (or a base of it). A function is admitted where it says, by
its return annotation, that it returns such an object. An argument without an annotation takes what `_KINDS` lists and
classes of the package that the section's own class is from.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
from typing import Any, get_args, get_origin

from stratagem.api.options import describe
from stratagem.errors import ConfigError
from stratagem_fit.signatures import annotations_of, in_plain_words, is_class, members

#: Classes whose objects any argument without an annotation may take.
_KINDS = (
    "torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler", "torch.utils.data.Dataset",
    "torch.utils.data.Sampler", "torch.utils.data.DataLoader", "stratagem.training.datamodule.DataModule",
    "stratagem.api.kinds.Plugin",
)  # fmt: skip
#: Modules whose functions may be handed to an argument that takes a callable: they compute, and nothing else.
_FUNCTIONS = ("math", "torch", "torch.nn.functional", "torch.nn.init")


def admit(target: Any, annotation: Any, package: str, found: str) -> None:
    """Refuse to call `target` for an argument with `annotation`, unless that is what the argument takes.

    Args:
        package: the top-level package of the section's own class.
        found: which argument is given what by whom; begins the error message.

    Raises:
        ConfigError: another kind of thing.
    """
    if not callable(target):
        raise ConfigError(f"{found}, which nothing can be built from", expected="a class or a function")
    wanted = [member for member in members(annotation) if member not in (None, type(None))]
    if any(_admits(member, target, package) for member in wanted):
        return
    raise _refusal(target, annotation, wanted, package, found)


def admit_object(value: Any, annotation: Any, package: str, found: str) -> None:
    """Refuse `value`, a class or a function that is handed over rather than called, unless the argument takes it."""
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
        elif in_plain_words(member) in (Any, type):
            return
    raise _refusal(value, annotation, wanted, package, found)


def is_factory(target: Any, annotation: Any) -> bool:
    """Whether something to call is wanted and `target` itself is it: then the call is the receiver's to make.

    That is so for a function, for a T where ``Callable[..., T]`` is wanted, and for a class whose objects cannot be
    called.
    """
    return any(_is_callable(member) and _is_factory(target, member) for member in members(annotation))


def _is_factory(target: Any, member: Any) -> bool:
    if not isinstance(target, type) or not issubclass(target, collections.abc.Callable):  # type: ignore[arg-type]
        return True
    returned = _returned(member)
    return is_class(returned) and issubclass(target, returned)


def _admits(member: Any, target: Any, package: str) -> bool:
    """Whether an argument of type `member` (of a union) may get what a call of `target` returns, or `target` itself."""
    if _is_callable(member):
        if _is_factory(target, member):
            return _may_be_called_by_receiver(target, member, package)
        return _is_listed(target, package)  # a class whose objects are called
    made = target if isinstance(target, type) else annotations_of(target).get("return", Any)
    if not is_class(made):
        return False
    plain = in_plain_words(member)
    if plain is Any:
        return _is_listed(made, package)
    return is_class(plain) and issubclass(made, plain)


def _may_be_called_by_receiver(target: Any, member: Any, package: str) -> bool:
    """Whether `target` fits ``Callable[..., T]``, or ``Callable``, as far as can be told without calling it."""
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
    untyped = not wanted or any(in_plain_words(member) is Any for member in wanted)
    if not untyped:
        names = [_in_words(member) for member in members(annotation)]
        return ConfigError(
            found, expected=" or ".join(names),
            do="" if is_type else "name a class, or a function whose return annotation says that it returns one",
        )  # fmt: skip
    kinds = ", ".join(path.rpartition(".")[2] for path in _KINDS)
    annotate = "annotate the argument with the class that it takes"
    return ConfigError(
        f"{found} and the argument has no annotation that allows it",
        expected=f"a {kinds}, or a class of the package {package}",
        do=annotate if is_type else f"{annotate}, and the function with what it returns",
    )


def _in_words(member: Any) -> str:
    """Spell an annotation as a person would, with what a callable must return and which class is wanted."""
    inner = _returned(member) if _is_callable(member) else (get_args(member) or (Any,))[0]
    if _is_callable(member):
        return f"a callable that returns {describe(inner)}" if is_class(inner) else "a callable"
    if get_origin(member) is type and is_class(inner):
        return f"a class derived from {inner.__name__}"
    return describe(in_plain_words(member))
