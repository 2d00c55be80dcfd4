"""List the hooks that exist, and those that a plugin implements."""

from __future__ import annotations

from typing import Any

from stratagem.api import hooks

# --- Checking ----------------------------------------------------------------------------------------------------


def hook_implementations(plugin: Any, *, of_class: bool = False) -> dict[str, dict[str, Any]]:
    """Return the methods of `plugin` (or, with `of_class`, of a class) with ``@hookimpl``: its options by hook name."""
    if isinstance(plugin, type) and not of_class:
        return {}
    cls = plugin if of_class else type(plugin)
    markers = {name: getattr(getattr(cls, name, None), "stratagem_impl", None) for name in dir(cls)}
    return {name: marker for name, marker in markers.items() if isinstance(marker, dict)}


def hook_specifications() -> dict[str, dict[str, Any]]:
    """Return every hook of `stratagem.api.hooks` by name, with its options."""
    return {name: value.stratagem_spec for name, value in vars(hooks).items() if hasattr(value, "stratagem_spec")}
