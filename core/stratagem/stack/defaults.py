"""The default plugins: from the catalog, and from what this machine has."""

from __future__ import annotations

from typing import Any

from stratagem.api.kinds import Environment
from stratagem.api.notebook import in_notebook
from stratagem.errors import PluginError
from stratagem.stack import catalog, registry
from stratagem.stack.construction import make
from stratagem.stack.plugins import Choice

# --- Defaults ----------------------------------------------------------------------------------------------------


def default(kind: str, role: str, reason: str = "the default", **values: Any) -> Choice:
    entry = registry.find(kind, catalog.default(role))
    return Choice(kind=kind, name=entry.name, plugin=make(entry, values), reason=reason, entry=entry)


def default_strategy(processes: int, num_nodes: int, environment: Environment) -> Choice:
    if processes * num_nodes == 1 and not (environment.processes_exist() and environment.local_processes()):
        return default("strategy", "strategy", "the default for one process")
    if in_notebook():
        return default("strategy", "strategy_notebook", "the default for several processes from a notebook")
    return default("strategy", "strategy_distributed", "the default for several processes")


# --- Detection ---------------------------------------------------------------------------------------------------


def _candidates(kind: str) -> list[tuple[registry.Entry, Any]]:
    """Return the installed plugins of `kind` that can be built, highest precedence first; broken ones are skipped."""
    found = []
    for entry in registry.entries(kind):
        try:
            target = entry.load()
            if isinstance(target, type):  # presets ("gpu") are other names for the same plugins
                found.append((entry, make(entry, {})))
        except Exception:  # noqa: BLE001, S112 - a broken package must not affect a run that does not name it
            continue
    return sorted(found, key=lambda pair: -pair[1].precedence)


def detect_accelerator() -> Choice:
    for entry, accelerator in _candidates("accelerator"):
        if _ask(accelerator.count):
            reason = f"{accelerator.count()} found" if accelerator.indexed else "no other device found"
            return Choice(kind="accelerator", name=entry.name, plugin=accelerator, reason=reason, entry=entry)
    raise _nothing_installed("accelerator")


def detect_environment() -> Choice:
    for entry, environment in _candidates("environment"):
        if evidence := _ask(environment.detect):
            return Choice(kind="environment", name=entry.name, plugin=environment, reason=evidence, entry=entry)
    raise _nothing_installed("environment")


def _ask(question: Any) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - a plugin that raises is not present
        return None


def _nothing_installed(kind: str) -> PluginError:
    packages = sorted(set(catalog.providers(kind).values()))
    return PluginError(f"no usable {kind} plugin is installed", do=f"run `pip install {' '.join(packages)}`")
