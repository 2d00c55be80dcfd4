"""What a run was resolved to, as plain data: written as ``run.lock``, held against a later run, compared between ranks.

A lock names each plugin with its package, version and entry point, each option with its value and origin, and the
arguments that were set. Secrets are redacted (`stratagem.api.options`).
"""

from __future__ import annotations

import enum
import functools
import json
import platform
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stratagem.api.options import options, redact
from stratagem.api.paths import replace_text
from stratagem.discovery import registry
from stratagem.errors import ConfigError

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
    """Return the lock of a run."""
    import torch

    from stratagem._version import __version__

    return {
        "format": _FORMAT,
        "versions": {"stratagem": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "processes": {"per_node": stack.num_processes, "nodes": stack.num_nodes},
        "arguments": {
            name: {"value": _shown(name, getattr(settings, name)), "origin": origin}
            for name, origin in sorted(settings.origins.items())
            if name not in registry.arguments() and name != "plugins" and hasattr(settings, name)
        },
        "plugins": [_describe(choice) for choice in stack.choices() if choice not in stack.automatic],
        "automatic": [_describe(choice) for choice in stack.automatic],
    }


def write(stack: Stack, settings: RunSettings) -> None:
    """Write the lock of a run into its ``default_root_dir``; a folder that refuses is only warned about."""
    path = Path(settings.default_root_dir) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(describe(stack, settings), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        warnings.warn(f"{path} could not be written ({error.strerror or error})", stacklevel=2)


def check(stack: Stack, settings: RunSettings, path: Path) -> None:
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
    now = flatten(describe(stack, settings))
    found = differences(now, before, "in this run", "in the lock", ignored=_PLACES | _NOT_COMPARED)
    if found:
        raise ConfigError(
            f"this run differs from {path}: {found}",
            expected="the same plugins, versions, options and arguments",
            do="undo the change, or drop lock= to write a new one",
        )


def facts(stack: Stack, settings: RunSettings) -> dict[str, Any]:
    """Return what all ranks of a run must agree on, by path."""
    lock = describe(stack, settings)
    flat = flatten(lock) | {"version of Python": _python_version()}
    flat |= {f"callback {plugin['name']}": _origin(plugin) for plugin in lock["automatic"]}
    return {name: value for name, value in flat.items() if name.partition(".")[0] not in _NOT_COMPARED}


def _python_version() -> str:
    """Return the version of Python that ranks compare; updates of one are compatible."""
    return ".".join(platform.python_version_tuple()[:2])


def flatten(lock: Mapping[str, Any]) -> dict[str, Any]:
    """Return the comparable part of a lock: value by the path that a user would write."""
    flat: dict[str, Any] = {f"version of {name}": v for name, v in lock["versions"].items() if name != "python"}
    flat |= {name: argument["value"] for name, argument in lock["arguments"].items()}
    kinds: dict[str, int] = {}
    for plugin in lock["plugins"]:
        number = kinds[plugin["kind"]] = kinds.get(plugin["kind"], 0) + 1
        title = plugin["kind"] if number == 1 else f"{plugin['kind']}#{number}"
        flat[title] = _origin(plugin)
        flat |= {f"{title}.{plugin['name']}.{name}": o["value"] for name, o in plugin["options"].items()}
    return flat


def _origin(plugin: Mapping[str, Any]) -> str:
    package = f" of {plugin['distribution']} {plugin['version']}" if plugin["distribution"] else ""
    return f"{plugin['name']}{package} ({plugin['entry_point'] or plugin['class']})"


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], one_name: str, other_name: str, ignored: set[str] | None = None
) -> str:
    """Return the first differences in words; an empty string if there are none."""
    missing = "(not set)"
    names = [
        name
        for name in sorted({**one, **other})
        if not _same(one.get(name, missing), other.get(name, missing))
        and name.partition(".")[0].partition("#")[0] not in (ignored or ())
    ]
    # Where two plugins differ, so do their options.
    names = [name for name in names if not any(name.startswith(f"{plugin}.") for plugin in names)]
    shown = [f"{n} is {one.get(n, missing)!r} {one_name} and {other.get(n, missing)!r} {other_name}" for n in names[:3]]
    return "; ".join(shown) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # NaN is itself, a tuple is a list


def _describe(choice: Choice) -> dict[str, Any]:
    entry, cls = choice.entry, type(choice.plugin)
    return {
        "kind": choice.kind,
        "name": choice.name,
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "distribution": entry.distribution if entry else None,
        "version": entry.version if entry else None,
        "entry_point": entry.value if entry else None,
        "options": {
            name: {
                "value": _shown(name, getattr(choice.plugin, option.name, None)),
                "origin": choice.origins.get(name, "default"),
            }
            for name, option in options(cls).items()
        },
    }


def _shown(name: str, value: Any) -> Any:
    return redact(name, _plain(value))


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it, the same in every process: no addresses, no order of a set."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, enum.Enum):
        return _plain(value.value)
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
