"""What a run was resolved to, as plain data: shown, written as ``run.lock`` for a later run, compared between ranks.

A lock names each plugin with its package, version and entry point, each option with its value and origin, and the
arguments that were set. Secrets are redacted (`stratagem.api.options`).
"""

from __future__ import annotations

import enum
import functools
import json
import platform
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stratagem.api.capabilities import Capabilities
from stratagem.api.options import options, redact
from stratagem.api.paths import replace_text
from stratagem.discovery import registry
from stratagem.errors import ConfigError, differences, shown
from stratagem.stack.plugins import hook_implementations, hook_specifications

if TYPE_CHECKING:
    from stratagem.config.settings import RunSettings
    from stratagem.stack.plugins import Choice, Stack

#: What a run writes into its ``default_root_dir``.
FILE_NAME = "run.lock"

_FORMAT = 1
#: Say where and how a run came to be, and not what it is: they differ between two runs of the same training.
_PLACES = {"environment", "launcher"}
_NOT_COMPARED = {"lock", "default_root_dir"}


def describe(stack: Stack, settings: RunSettings) -> dict[str, Any]:
    """Return the resolved stack for people: plugins in the order in which they act, values as text."""
    return {
        "processes": {"per_node": stack.num_processes, "nodes": stack.num_nodes, "devices": list(stack.devices)},
        "arguments": _arguments(settings, _as_text),
        "plugins": [
            {
                "kind": choice.kind,
                "name": choice.name,
                **_package(choice),
                "reason": choice.reason,
                "options": [{"name": name} | option for name, option in _options(choice, _as_text).items()],
                **traits(getattr(choice.plugin, "capabilities", None), hook_implementations(choice.plugin)),
                "absorbed": stack.precision_absorbed and choice is stack.precision,
            }
            for choice in stack.choices()
        ],
    }


def traits(capabilities: Any, implemented: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the words of `capabilities`, and the names of `implemented` hooks by role, as plain data.

    The roles: answered, wrapped, or called for all plugins that have it.
    """
    declared = capabilities if isinstance(capabilities, Capabilities) else Capabilities()
    found = {word: sorted(getattr(declared, word)) for word in ("provides", "requires", "conflicts")}
    found |= {"answers": [], "wraps": [], "acts": []}
    specifications = hook_specifications()
    for name, marker in sorted(implemented.items()):
        answered = specifications.get(name, {}).get("firstresult")
        found["wraps" if marker["wrapper"] else "answers" if answered else "acts"].append(name)
    return found


def lock(stack: Stack, settings: RunSettings) -> dict[str, Any]:
    """Return the lock of a run."""
    import torch

    from stratagem._version import __version__

    arguments = _arguments(settings, _as_json)
    arguments.pop("plugins", None)
    return {
        "format": _FORMAT,
        "versions": {"stratagem": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "processes": {"per_node": stack.num_processes, "nodes": stack.num_nodes},
        "arguments": arguments,
        "plugins": [_locked(choice) for choice in stack.choices() if choice not in stack.automatic],
        "automatic": [_locked(choice) for choice in stack.automatic],
    }


def write_lock(stack: Stack, settings: RunSettings) -> None:
    """Write the lock of a run into its ``default_root_dir``; a folder that refuses is only warned about."""
    path = Path(settings.default_root_dir) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(lock(stack, settings), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        warnings.warn(f"{path} could not be written ({error.strerror or error})", stacklevel=2)


def check_lock(stack: Stack, settings: RunSettings, path: Path) -> None:
    """Refuse a run if it differs from the lock at `path`, in plugins, versions, options or arguments.

    Where processes come from (environment, launcher), how many there are, folders, and the callbacks that every run has
    where they are installed may differ.

    Raises:
        ConfigError: the first differences, or that there is no such lock.
    """
    try:
        locked = json.loads(path.read_text(encoding="utf-8"))
        if locked["format"] != _FORMAT:
            raise ValueError(f"format {locked['format']}")
        before = flatten(locked)
    except FileNotFoundError:
        raise ConfigError(
            f"lock {str(path)!r} does not exist", expected=f"a {FILE_NAME} that an earlier run wrote",
            do="train once without lock=, and keep the file",
        ) from None  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"lock {str(path)!r} cannot be read ({error})", expected=f"a {FILE_NAME}") from error
    now, ignored = flatten(lock(stack, settings)), _PLACES | _NOT_COMPARED
    if found := differences(now, before, "in this run", "in the lock", ignored=ignored):
        raise ConfigError(
            f"this run differs from {path}: {found}",
            expected="the same plugins, versions, options and arguments",
            do="undo the change, or drop lock= to write a new one",
        )


def facts(stack: Stack, settings: RunSettings) -> dict[str, Any]:
    """Return what all ranks of a run must agree on, by path."""
    locked = lock(stack, settings)
    # Updates of one version of Python are compatible.
    flat = flatten(locked) | {"version of Python": ".".join(platform.python_version_tuple()[:2])}
    flat |= {f"callback {plugin['name']}": _origin(plugin) for plugin in locked["automatic"]}
    return {name: value for name, value in flat.items() if name.partition(".")[0] not in _NOT_COMPARED}


def flatten(locked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the comparable part of a lock: value by the path that a user would write."""
    flat: dict[str, Any] = {f"version of {name}": v for name, v in locked["versions"].items() if name != "python"}
    flat |= {name: argument["value"] for name, argument in locked["arguments"].items()}
    kinds: dict[str, int] = {}
    for plugin in locked["plugins"]:
        number = kinds[plugin["kind"]] = kinds.get(plugin["kind"], 0) + 1
        title = plugin["kind"] if number == 1 else f"{plugin['kind']}#{number}"
        flat[title] = _origin(plugin)
        flat |= {f"{title}.{plugin['name']}.{name}": o["value"] for name, o in plugin["options"].items()}
    return flat


def _origin(plugin: Mapping[str, Any]) -> str:
    package = f" of {plugin['distribution']} {plugin['version']}" if plugin["distribution"] else ""
    return f"{plugin['name']}{package} ({plugin['entry_point'] or plugin['class']})"


def _locked(choice: Choice) -> dict[str, Any]:
    cls = type(choice.plugin)
    return {
        "kind": choice.kind,
        "name": choice.name,
        "class": f"{cls.__module__}:{cls.__qualname__}",
        **_package(choice),
        "entry_point": choice.entry.value if choice.entry else None,
        "options": _options(choice, _as_json),
    }


def _package(choice: Choice) -> dict[str, str | None]:
    entry = choice.entry
    return {"distribution": entry.distribution if entry else None, "version": entry.version if entry else None}


def _arguments(settings: RunSettings, form: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the arguments that were set and choose no plugin, with values in a `form` and origins."""
    return {
        name: {"value": form(name, getattr(settings, name)), "origin": origin}
        for name, origin in sorted(settings.origins.items())
        if name not in registry.arguments() and hasattr(settings, name)
    }


def _options(choice: Choice, form: Callable[[str, Any], Any]) -> dict[str, Any]:
    return {
        name: {
            "value": form(name, getattr(choice.plugin, option.name, None)),
            "origin": choice.origins.get(name, "default"),
        }
        for name, option in options(type(choice.plugin)).items()
    }


def _as_text(name: str, value: Any) -> str:
    return shown(redact(name, value), None)


def _as_json(name: str, value: Any) -> Any:
    return redact(name, _plain(value))


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it, the same in every process: no addresses, no order of a set."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if attrs.has(type(value)):
        return {"class": _name(type(value))} | {
            field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.init
        }
    return f"<{_name(value) if hasattr(value, '__qualname__') else _name(type(value))}>"


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}:{value.__qualname__}"
