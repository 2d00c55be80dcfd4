"""Refuse methods that another trainer calls and this one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem.stack.plugins import Choice
from stratagem_trainer.api.events import CallbackEvents, LoggerMethods


def refuse_moved(owner: Any, who: str, moved: Mapping[str, str], defines: Callable[[Any, str], bool] = hasattr) -> None:
    """Refuse methods of `owner`, which messages call `who`, with what to define instead and what to do.

    Raises:
        ConfigError: it `defines` one of `moved`, a table of `moved_names`.
    """
    for name, instead in moved.items():
        if defines(owner, name):
            expected, _, do = instead.partition("; ")
            raise ConfigError(f"{who} defines {name}, which is never called", expected=expected, do=do)


def prepare_methods(choices: Iterable[Choice]) -> bool:
    """Mark methods of callbacks and loggers that were set on a class after it was made; refuse moved ones.

    Returns:
        Whether a method was marked: plugins that were registered before must be registered again.

    Raises:
        ConfigError: one of `choices` defines a method that is never called.
    """
    found = False
    for choice in choices:
        plugin, cls = choice.plugin, type(choice.plugin)
        if issubclass(cls, CallbackEvents | LoggerMethods):
            found |= cls.mark_methods()
        if choice.kind in ("callback", "plugin"):
            refuse_moved(plugin, str(choice), moved_names("callback_methods"))
        if not _is_ours(cls) or any(map(callable, getattr(plugin, "__dict__", {}).values())):
            refuse_moved(plugin, str(choice), moved_methods(cls), _defines)
    return found


def moved_methods(cls: type[Any]) -> dict[str, str]:
    """Return the methods that nobody calls in `cls`, a class of an installed plugin or one derived from it."""
    moved: dict[str, str] = {}
    installed = [each for each in reversed(cls.__mro__) if _is_ours(each)]
    for each in installed:
        moved = {name: instead for name, instead in moved.items() if name not in vars(each)}
        moved.update(moved_names(f"methods of {each.__name__}"))
        if each is not installed[-1]:
            moved.update(moved_names(f"methods below {each.__name__}"))
    return moved


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.startswith("stratagem")


def _defines(plugin: Any, name: str) -> bool:
    """Whether `plugin` has a method or a property `name` that no installed class gave it."""
    owner = next((cls for cls in type(plugin).__mro__ if name in vars(cls)), None)
    if owner is None:
        return callable(getattr(plugin, "__dict__", {}).get(name))
    own = vars(owner)[name]
    return not _is_ours(owner) and (callable(own) or isinstance(own, property | staticmethod | classmethod))
