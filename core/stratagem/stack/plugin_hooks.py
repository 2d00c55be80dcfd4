"""List the hooks that exist, and those that a plugin implements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.api import hooks, process_hooks
from stratagem.discovery import registry


def hook_implementations(plugin: Any, *, of_class: bool = False) -> dict[str, dict[str, Any]]:
    """Return the methods of `plugin` (or, with `of_class`, of a class) with ``@hookimpl``: its options by hook name."""
    if isinstance(plugin, type) and not of_class:
        return {}
    cls = plugin if of_class else type(plugin)
    found = {}
    for name in dir(cls):
        marker = getattr(getattr(cls, name, None), "stratagem_impl", None)
        if isinstance(marker, dict):
            found[name] = marker
    return found


def hook_modules() -> list[Any]:
    """Return the modules with specifications: those of `stratagem.api`, and those of installed kinds."""
    return [process_hooks, hooks, *(kind.hooks for kind in registry.kinds().values() if kind.hooks is not None)]


def hook_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the function that specifies each hook, by name."""
    return _functions_in(*hook_modules())


@functools.cache
def _functions_in(*modules: Any) -> Mapping[str, Callable[..., Any]]:
    return {name: function for module in modules for name, function in registry.hooks_in(module).items()}


def hook_specifications() -> dict[str, dict[str, Any]]:
    """Return every hook by name, with its options."""
    return {name: value.stratagem_spec for name, value in hook_functions().items()}  # type: ignore[attr-defined]
