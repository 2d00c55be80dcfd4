"""Refuse methods that another trainer calls and this one does not, and warn of hooks that are misspelled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, mistyped
from stratagem.stack.plugin_hooks import hook_functions, hook_implementations
from stratagem.stack.plugins import Choice
from stratagem_trainer.api.kinds import Callback, Logger

#: How the names of the methods begin that are hooks without a mark.
_PREFIXES: Final = ("on_", "log_")


def refuse_moved(owner: Any, who: str, moved: Mapping[str, str], defines: Callable[[Any, str], bool] = hasattr) -> None:
    """Refuse methods of `owner`, which messages call `who`, with what to define instead and what to do.

    Raises:
        ConfigError: it `defines` one of `moved`, a table of `moved_names`.
    """
    for name, instead in moved.items():
        if defines(owner, name):
            expected, _, do = instead.partition("; ")
            raise ConfigError(f"{who} defines {name}, which is never called", expected=expected, do=do)


def check_methods(choices: Iterable[Choice]) -> None:
    """Refuse methods of callbacks that other trainers call, and warn of names that are almost those of hooks.

    Raises:
        ConfigError: names the method, and what to define instead.
    """
    hooks = {name for name in hook_functions() if name.startswith(_PREFIXES)}
    for choice in choices:
        if choice.kind in ("callback", "plugin"):
            refuse_moved(choice.plugin, str(choice), moved_names("callback_methods"))
        if isinstance(choice.plugin, Callback | Logger):
            _warn_of_misspelled(choice, hooks)


def _warn_of_misspelled(choice: Choice, hooks: set[str]) -> None:
    lacking = hooks - hook_implementations(choice.plugin).keys()
    for name in dir(type(choice.plugin)):
        is_own = name.startswith(_PREFIXES) and name not in hooks
        if is_own and (hint := mistyped(name, sorted(lacking))):
            warnings.warn(f"{choice} defines {name}, which nothing calls; {hint}", stacklevel=2)
