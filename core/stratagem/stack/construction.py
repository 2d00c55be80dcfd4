"""Build a plugin from an entry point and options; the default plugins, from the catalog."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NoReturn

from stratagem.api.kinds import Environment
from stratagem.api.options import build, convert_options, options
from stratagem.discovery import catalog, registry
from stratagem.errors import PluginError, StratagemError
from stratagem.stack.plugins import Choice


def make(entry: registry.Entry, values: Mapping[str, Any], texts: Container[str] = (), path: str = "") -> Any:
    """Load the plugin of `entry` and build it with the options in `values`, parsing those named in `texts`.

    Args:
        path: what the user typed for the plugin, for messages, if that is not its kind and name.
    """
    target, kind = entry.load(), registry.kinds().get(entry.kind)
    if kind is None:
        raise PluginError(
            f"{entry.kind} {entry.name!r} of {entry.distribution} is of a kind that no installed package has",
            do="install the package that has it",
        )
    path = path or f"{kind.argument}.{entry.name}"
    if isinstance(target, type):
        plugin: Any = build(target, convert_options(target, values, path, texts) if values else {}, path)
        return plugin if isinstance(plugin, kind.base) else _refuse(plugin, entry, kind.base)
    try:
        preset = target()
    except StratagemError:
        raise
    except Exception as error:
        raise PluginError(f"{path} of {entry.distribution} failed ({type(error).__name__}: {error})") from error
    if not isinstance(preset, kind.base):
        _refuse(preset, entry, kind.base)
    if not values:
        return preset
    converted = convert_options(type(preset), values, path, texts)
    current = {name: getattr(preset, option.name) for name, option in options(type(preset)).items()}
    return build(type(preset), current | converted, path)


def _refuse(plugin: Any, entry: registry.Entry, base: type[Any]) -> NoReturn:
    raise PluginError(
        f"{entry.kind} {entry.name!r} of {entry.distribution} is a {type(plugin).__name__}",
        expected=f"a stratagem.{base.__name__}",
        do="its author should declare it in the entry-point group of its kind",
    )


# --- Defaults ---------------------------------------------------------------------------------------------------------


def default(kind: str, role: str, reason: str = "the default") -> Choice:
    """Return the plugin of `role`."""
    return by_name(kind, catalog.default(role), reason)


def by_name(kind: str, name: str, reason: str, /, *, path: str = "", **values: Any) -> Choice:
    """Return the plugin of that name, which the user did not choose, with the options in `values`."""
    entry = registry.find(kind, name)
    plugin = make(entry, values, path=path)
    return Choice(kind=kind, name=entry.name, plugin=plugin, reason=reason, entry=entry)


def default_strategy(accelerator: Choice, processes: int, num_nodes: int, environment: Environment) -> Choice:
    name = accelerator.plugin.default_strategy(processes)
    if name is not None:
        return by_name("strategy", name, f"the default of {accelerator} with {processes} devices")
    if processes * num_nodes == 1 and not (environment.processes_exist() and environment.local_processes()):
        return default("strategy", "strategy", "the default for one process")
    return default("strategy", "strategy_distributed", "the default for several processes")
