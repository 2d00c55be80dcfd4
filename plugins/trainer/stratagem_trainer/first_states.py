"""The state of a plugin belongs to fits of one module: with another module it begins again."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

from stratagem.api.kinds import keeps_state

if TYPE_CHECKING:
    from stratagem.stack.plugins import Stack

#: The module of a plugin's last fit, and the plugin's state before the first fit, by its id: it may equal another.
_FITTED: dict[int, tuple[ref[Any], Any]] = {}


def begin_again(stack: Stack, module: Any) -> None:
    """Give each plugin of `stack` whose last fit was of another module than `module` the state that it had at first.

    For the process that the user started, before others are launched. What a checkpoint holds is restored later.
    """
    for plugin in (choice.plugin for choice in stack.active() if keeps_state(choice.plugin, "load_state_dict")):
        if id(plugin) not in _FITTED:
            _FITTED[id(plugin)] = ref(module), _copied_state(plugin)
            finalize(plugin, _FITTED.pop, id(plugin), None)
        last, first = _FITTED[id(plugin)]
        if last() is not module and isinstance(first, frozenset):
            for name in vars(plugin).keys() - first:
                delattr(plugin, name)
        elif last() is not module:
            plugin.load_state_dict(copy.deepcopy(first))
        _FITTED[id(plugin)] = ref(module), first


def _copied_state(plugin: Any) -> Any:
    """Return a copy of the state; the names of attributes if the plugin has none before a fit makes others."""
    with contextlib.suppress(Exception):  # a user's method may read what `on_fit_start` makes
        return copy.deepcopy(plugin.state_dict())
    return frozenset(getattr(plugin, "__dict__", ()))
