"""The default plugins, from the catalog."""

from __future__ import annotations

from typing import Any

from stratagem.api.kinds import Environment
from stratagem.api.notebook import in_notebook
from stratagem.discovery import catalog, registry
from stratagem.stack.construction import make
from stratagem.stack.plugins import Choice


def default(kind: str, role: str, reason: str = "the default", /, **values: Any) -> Choice:
    """Return the plugin of `role`; an argument of that name, such as ``compile=``, has its options in `values`."""
    return by_name(kind, catalog.default(role), reason, path=role if values else "", **values)


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
    if in_notebook():
        return default("strategy", "strategy_notebook", "the default for several processes from a notebook")
    return default("strategy", "strategy_distributed", "the default for several processes")
