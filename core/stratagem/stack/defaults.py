"""The default plugins, from the catalog."""

from __future__ import annotations

from typing import Any

from stratagem.api.kinds import Environment
from stratagem.api.notebook import in_notebook
from stratagem.stack import catalog, registry
from stratagem.stack.construction import make
from stratagem.stack.plugins import Choice


def default(kind: str, role: str, reason: str = "the default", /, **values: Any) -> Choice:
    """Return the plugin of `role`; an argument of that name, such as ``compile=``, has its options in `values`."""
    entry = registry.find(kind, catalog.default(role))
    plugin = make(entry, values, path=role if values else "")
    return Choice(kind=kind, name=entry.name, plugin=plugin, reason=reason, entry=entry)


def default_strategy(accelerator: Choice, processes: int, num_nodes: int, environment: Environment) -> Choice:
    name = accelerator.plugin.default_strategy(processes)
    if name is not None:
        entry = registry.find("strategy", name)
        reason = f"the default of {accelerator} with {processes} devices"
        return Choice(kind="strategy", name=entry.name, plugin=make(entry, {}), reason=reason, entry=entry)
    if processes * num_nodes == 1 and not (environment.processes_exist() and environment.local_processes()):
        return default("strategy", "strategy", "the default for one process")
    if in_notebook():
        return default("strategy", "strategy_notebook", "the default for several processes from a notebook")
    return default("strategy", "strategy_distributed", "the default for several processes")
