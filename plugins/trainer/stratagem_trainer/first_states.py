"""The state of a plugin belongs to fits of one module: with another module it begins again."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from stratagem.api.kinds import keeps_state

if TYPE_CHECKING:
    from stratagem.stack.plugins import Stack

#: A plugin, the module of its last fit, and its state before the first fit, by the plugin's id: it may equal another.
_FITTED: dict[int, tuple[ReferenceType[Any], ReferenceType[Any], dict[str, Any] | None]] = {}


def begin_again(stack: Stack, module: Any) -> None:
    """Give each plugin of `stack` whose last fit was of another module than `module` the state that it had at first.

    For the process that the user started, before others are launched. What a checkpoint holds is restored later.
    """
    for plugin in (choice.plugin for choice in stack.active() if keeps_state(choice.plugin, "load_state_dict")):
        known = _FITTED.get(id(plugin))
        first = _copied_state(plugin) if known is None else known[2]
        if known is not None and known[1]() is not module and first is not None:
            plugin.load_state_dict(copy.deepcopy(first))
        _FITTED[id(plugin)] = ref(plugin, functools.partial(_forget, id(plugin))), ref(module), first


def _copied_state(plugin: Any) -> Any:
    """Return a copy of the state; None if the plugin has none before a fit begins, where it makes a new one."""
    try:
        return copy.deepcopy(plugin.state_dict())
    except Exception:  # noqa: BLE001 - code of the user's, which is asked for the first time when a checkpoint is saved
        return None


def _forget(key: int, _: Any) -> None:
    _FITTED.pop(key, None)
