"""Under which key a plugin's state is saved, and which plugin gets it back.

[Note: state keys]
A key is ``<kind>.<class> {options} #n``::

    precision.some_package:ScaledPrecision
    callback.some_package.checkpoints:Keeper {"monitor": "val_loss"}

The class is the nearest one, from the plugin's own up to its bases, that defines the state or that an installed entry
point names: an alias, a preset, a mapping with options, an instance and a subclass that adds no state all have the same
key. For kinds of which a run has several of one class, the options follow that are not at their defaults. ``#n`` counts
plugins that are equal in all of that.

A plugin gets the state of its own key. What is left is matched within one class: a plugin and a state whose options
differ least, if no other pair of either of them differs as little. So an option may change between two runs, and the
order of callbacks may, too. Nothing is guessed: state without a plugin is warned about, and with it the plugins of its
kind that find none. A plugin that is new to the run is not: the checkpoint holds nothing that was its own.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.api.state_keys import options_key
from stratagem.checkpoint.state_checks import applying, check_similar
from stratagem.errors import ConfigError
from stratagem.stack import registry

if TYPE_CHECKING:
    from stratagem.stack.plugins import Stack


_METHODS = ("state_dict", "rank_state")

_KEY = re.compile(r"(?P<class>\S+)(?: (?P<options>\{.*\}))?(?: #\d+)?")


def class_key(cls: type[Any]) -> str:
    """Return the name of the class that defines what instances of `cls` save; see [Note: state keys]."""
    named = [entry.value.partition(":") for entry in registry.entries(hidden=True)]
    owner = next((each for each in cls.__mro__ if _defines_state(each) or _is_named(each, named)), cls)
    # A process that was spawned knows the user's script by another name.
    module = "__main__" if owner.__module__ == "__mp_main__" else owner.__module__
    return f"{module}:{owner.__qualname__}"


def _default_key(plugin: Any) -> str:
    """Return the key of a plugin that defines none; a callback may be any object with hooks."""
    options = options_key(plugin) if getattr(plugin, "identified_by_options", True) else ""
    return class_key(type(plugin)) + options


def keyed(stack: Stack, method: str) -> list[tuple[str, Any]]:
    """Return the plugins of `stack` that have `method`, each with its key."""
    found: dict[str, Any] = {}
    for choice in stack.active():
        plugin = choice.plugin
        if not callable(getattr(plugin, method, None)):
            continue
        # A callback may be any object with hooks.
        own = getattr(plugin, "state_key", None)
        if callable(own):
            raise ConfigError(
                f"{choice} has a method state_key", expected="a property that returns a text",
                do="put @property above it",
            )  # fmt: skip
        base = key = f"{choice.kind}.{own if isinstance(own, str) else _default_key(plugin)}"
        number = 0
        while key in found:
            number += 1
            key = f"{base} #{number}"
        found[key] = plugin
    return list(found.items())


def stateful(stack: Stack) -> list[tuple[str, Any]]:
    """Return the plugins with state to survive a restart, by the key that it is saved under."""
    return keyed(stack, "state_dict")


def stateful_by_rank(stack: Stack) -> list[tuple[str, Any]]:
    """Return the plugins with state that differs from rank to rank, by the key that it is saved under."""
    return keyed(stack, "rank_state")


def restore(stack: Stack, saved: Mapping[str, Any]) -> None:
    """Apply the states in `saved` to the plugins of `stack` that they belong to."""
    plugins = dict(stateful(stack))
    for key, saved_as in matched(plugins, saved).items():
        where = f"the checkpoint's state of {key}"
        with applying(where):
            check_similar(plugins[key].state_dict(), saved[saved_as], where)
            plugins[key].load_state_dict(saved[saved_as])


def matched(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return for each key of `wanted` the key in `saved` whose state is the same plugin's, where there is one."""
    saved = list(saved)
    found = {key: key for key in wanted if key in saved}
    wanted, saved = [key for key in wanted if key not in found], [key for key in saved if key not in found]
    while pair := _closest(wanted, saved):
        found[pair[0]] = pair[1]
        wanted.remove(pair[0])
        saved.remove(pair[1])
    return found


def warn_of_differences(stack: Stack, state: Mapping[str, Any]) -> None:
    """Warn of state in the checkpoint `state` that no plugin of `stack` takes, and of plugins that it may be for.

    A plugin that took part in the run that saved, and has no state in the checkpoint, is warned of as well.
    """
    saved = _saved(state)
    here = {key: plugin for method in _METHODS for key, plugin in keyed(stack, method)}
    found = matched(here, saved)
    left = [key for key in saved if key not in found.values() and not _is_empty(saved[key])]
    choices = {id(choice.plugin): choice for choice in stack.choices()}
    lacking = {id(plugin): choices[id(plugin)] for key, plugin in here.items() if key not in found}.values()
    kinds = {key.partition(".")[0] for key in left}
    asked_for = [choice for choice in lacking if choice.reason.startswith(("asked for", "given as"))]
    wrote = state.get("format", {}).get("plugins", {})
    missing = [
        str(choice)
        for choice in asked_for
        if choice.kind in kinds or (choice.entry is not None and f"{choice.kind}.{choice.entry.name}" in wrote)
    ]
    parts = [f"has no state of {' and of '.join(missing)}, which begins without it"] if missing else []
    parts += (
        [f"holds state of {' and of '.join(left)}, which no plugin of this run takes: it is dropped"] if left else []
    )
    if parts:
        warnings.warn(f"the checkpoint {', and '.join(parts)}", stacklevel=2)
    for key in (key for key, plugin in here.items() if key.endswith(" #1") and not _has_options(plugin)):
        name = key.removesuffix(" #1")
        warnings.warn(
            f"the checkpoint tells plugins ({name}) apart by their order alone: give the class a property state_key "
            "that returns a text for each",
            stacklevel=2,
        )


def _has_options(plugin: Any) -> bool:
    """Whether the class of `plugin` is an attrs class itself: what its instances were given is known."""
    return "__attrs_attrs__" in vars(type(plugin))


def _defines_state(cls: type[Any]) -> bool:
    return any(method in vars(cls) for method in _METHODS)


def _is_named(cls: type[Any], named: list[tuple[str, str, str]]) -> bool:
    """Whether an entry point names `cls`, where it is defined or where a package around it has it again."""
    return any(
        attribute == cls.__qualname__ and (cls.__module__ == module or cls.__module__.startswith(f"{module}."))
        for module, _, attribute in named
    )


def _closest(wanted: list[str], saved: list[str]) -> tuple[str, str] | None:
    """Return a plugin and a state that differ less than either does from any other; None if there are none."""
    distances = {(one, other): d for one in wanted for other in saved if (d := _distance(one, other)) is not None}
    for pair, distance in sorted(distances.items(), key=lambda item: item[1]):
        rivals = [d for other, d in distances.items() if other != pair and (other[0] == pair[0] or other[1] == pair[1])]
        if all(distance < rival for rival in rivals):
            return pair
    return None


def _distance(one: str, other: str) -> int | None:
    """Return in how many options two keys differ; None if they are of different classes."""
    mine, theirs = _KEY.fullmatch(one), _KEY.fullmatch(other)
    if mine is None or theirs is None or mine["class"] != theirs["class"]:
        return None
    try:
        first, second = json.loads(mine["options"] or "{}"), json.loads(theirs["options"] or "{}")
    except ValueError:
        return None
    return len([name for name in {*first, *second} if first.get(name, _KEY) != second.get(name, _KEY)])


def _saved(state: Mapping[str, Any]) -> dict[str, Any]:
    ranks = state.get("ranks") or [{}]
    by_rank = {key: value for rank in ranks for key, value in rank.get("plugins", {}).items() if not _is_empty(value)}
    return by_rank | dict(state.get("callbacks", {})) | dict(state.get("plugins", {}))


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(item) for item in value.values())
    return isinstance(value, list | tuple) and all(_is_empty(item) for item in value)
