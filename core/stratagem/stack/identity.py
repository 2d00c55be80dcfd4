"""The key under which a plugin's state is saved, and the plugin that gets a saved state.

[Note: state keys]
A key is ``<kind>.<class> {options} #n``::

    precision.some_package:ScaledPrecision
    callback.some_package.checkpoints:Keeper {"monitor": "val_loss"}

The class is the first one in the plugin's MRO that defines the state or that an installed entry point names. So an
alias, a preset, a mapping with options, an instance and a subclass without new state all have the same key. For kinds
of which a run may have several of one class, the options that are not at their defaults follow. ``#n`` numbers plugins
with equal keys.

A plugin gets the state of its own key. The others are matched within one class: a plugin and a state whose options
differ least, if the match is unique. So options and the order of callbacks may change between two runs. A state without
a plugin causes a warning, which also names the plugins of its kind without a state. A plugin that is new to the run
does not.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.api.kinds import keeps_state
from stratagem.api.options import options_key
from stratagem.checkpoint.rank_rows import ranks_in
from stratagem.checkpoint.state_checks import check_similar, errors_naming
from stratagem.discovery import registry
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.stack.plugins import Stack

_METHODS = ("state_dict", "rank_state")

_KEY = re.compile(r"(?P<class>\S+)(?: (?P<options>\{.*\}))?(?: #\d+)?")


def class_key(cls: type[Any]) -> str:
    """Return the name of the class that defines the state of `cls`; see [Note: state keys]."""
    named = [entry.value.partition(":") for entry in registry.entries(hidden=True)]
    owner = next((each for each in cls.__mro__ if _defines_state(each) or _is_named(each, named)), cls)
    # In a spawned process the user's script has another name.
    module = "__main__" if owner.__module__ == "__mp_main__" else owner.__module__
    return f"{module}:{owner.__qualname__}"


def _default_key(plugin: Any) -> str:
    """Return the key of a plugin without a `state_key`; a callback may be any object with hooks."""
    options = options_key(plugin) if getattr(plugin, "identified_by_options", True) else ""
    return class_key(type(plugin)) + options


def plugins_by_key(stack: Stack, method: str) -> list[tuple[str, Any]]:
    """Return the plugins of `stack` that have `method`, such as "state_dict", each with its key."""
    found: dict[str, Any] = {}
    for choice in stack.active():
        plugin = choice.plugin
        if not keeps_state(plugin, method):
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


def restore(stack: Stack, saved: Mapping[str, Any]) -> None:
    """Apply the states in `saved` to the plugins of `stack` that they belong to."""
    plugins = dict(plugins_by_key(stack, "state_dict"))
    for key, saved_as in match_keys(plugins, saved).items():
        where = f"the checkpoint's state of {key}"
        with errors_naming(where):
            check_similar(plugins[key].state_dict(), saved[saved_as], where)
            plugins[key].load_state_dict(saved[saved_as])


def match_keys(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return for each key of `wanted` the matching key in `saved`, if there is one; see [Note: state keys]."""
    saved = list(saved)
    found = {key: key for key in wanted if key in saved}
    wanted, saved = [key for key in wanted if key not in found], [key for key in saved if key not in found]
    while pair := _closest(wanted, saved):
        found[pair[0]] = pair[1]
        wanted.remove(pair[0])
        saved.remove(pair[1])
    return found


def warn_of_differences(stack: Stack, state: Mapping[str, Any]) -> None:
    """Warn of state in the checkpoint `state` that no plugin of `stack` uses, and of plugins that it may belong to.

    Warn as well of a plugin that was in the run that saved, and has no state in the checkpoint.
    """
    saved = _saved(state)
    here = {key: plugin for method in _METHODS for key, plugin in plugins_by_key(stack, method)}
    found = match_keys(here, saved)
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
    parts = [f"has no state of {' and of '.join(missing)}, which starts without it"] if missing else []
    parts += [f"has state of {' and of '.join(left)}, which no plugin of this run uses: it is dropped"] if left else []
    if parts:
        warnings.warn(f"the checkpoint {', and '.join(parts)}", stacklevel=2)
    known = "__attrs_attrs__"  # in a class whose options attrs knows
    for key in (key for key, plugin in here.items() if key.endswith(" #1") and known not in vars(type(plugin))):
        name = key.removesuffix(" #1")
        warnings.warn(
            f"the checkpoint distinguishes plugins ({name}) only by their order: add a property state_key to the "
            "class, which returns a different text for each",
            stacklevel=2,
        )


def _defines_state(cls: type[Any]) -> bool:
    return any(method in vars(cls) for method in _METHODS)


def _is_named(cls: type[Any], named: list[tuple[str, str, str]]) -> bool:
    """Whether an entry point names `cls`, in its own module or in a package that re-exports it."""
    return any(
        attribute == cls.__qualname__ and (cls.__module__ == module or cls.__module__.startswith(f"{module}."))
        for module, _, attribute in named
    )


def _closest(wanted: list[str], saved: list[str]) -> tuple[str, str] | None:
    """Return a plugin and a state whose distance is smaller than that of any other pair of either; None if none."""
    distances = {(one, other): d for one in wanted for other in saved if (d := _distance(one, other)) is not None}
    for pair, distance in sorted(distances.items(), key=lambda item: item[1]):
        rivals = [d for other, d in distances.items() if other != pair and (other[0] == pair[0] or other[1] == pair[1])]
        if all(distance < rival for rival in rivals):
            return pair
    return None


def _distance(one: str, other: str) -> int | None:
    """Return the number of options in which two keys differ; None for different classes."""
    mine, theirs = _KEY.fullmatch(one), _KEY.fullmatch(other)
    if mine is None or theirs is None or mine["class"] != theirs["class"]:
        return None
    try:
        first, second = json.loads(mine["options"] or "{}"), json.loads(theirs["options"] or "{}")
    except ValueError:
        return None
    return len([name for name in {*first, *second} if first.get(name, _KEY) != second.get(name, _KEY)])


def _saved(state: Mapping[str, Any]) -> dict[str, Any]:
    ranks = ranks_in(state, "the checkpoint")
    ranks = ranks if isinstance(ranks, list) else ranks[:1]  # of thousands, in which plugins are the same
    by_rank = {key: value for rank in ranks for key, value in rank.get("plugins", {}).items() if not _is_empty(value)}
    return by_rank | dict(state.get("callbacks", {})) | dict(state.get("plugins", {}))


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(item) for item in value.values())
    return isinstance(value, list | tuple) and all(_is_empty(item) for item in value)
