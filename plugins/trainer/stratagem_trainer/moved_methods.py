"""Refuse methods that another trainer calls and this one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem.stack.plugins import Choice


def refuse_moved(owner: Any, who: str, moved: Mapping[str, str], defines: Callable[[Any, str], bool] = hasattr) -> None:
    """Refuse methods of `owner`, which messages call `who`, with what to define instead and what to do.

    Raises:
        ConfigError: it `defines` one of `moved`, a table of `moved_names`.
    """
    for name, instead in moved.items():
        if defines(owner, name):
            expected, _, do = instead.partition("; ")
            raise ConfigError(f"{who} defines {name}, which is never called", expected=expected, do=do)


def refuse_moved_callbacks(choices: Iterable[Choice]) -> None:
    """`refuse_moved` for those of `choices` that are callbacks or instances of no kind."""
    for choice in choices:
        if choice.kind in ("callback", "plugin"):
            refuse_moved(choice.plugin, str(choice), moved_names("callback_methods"))
