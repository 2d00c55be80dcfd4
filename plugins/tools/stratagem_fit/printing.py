"""Print the complete configuration of a run file, including defaults."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from stratagem.api.options import convert, option_types, redact
from stratagem.config.settings import PluginOption, added_arguments, gather, option_names
from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem_fit.job import Job
from stratagem_fit.plans import Plan, find
from stratagem_fit.runfile import parse_text
from stratagem_fit.signatures import parameters
from stratagem_plugin_checks import class_of
from stratagem_trainer.settings import TrainerSettings
from stratagem_trainer.sources import from_environment

#: Marks a value that a run file cannot express.
_UNSUPPORTED = object()


def render(job: Job) -> str:
    """Return the complete configuration of `job` as YAML, which is a run file, too."""
    import yaml

    secrets: list[str] = []
    sections: dict[str, Any] = {"seed": job.file.seed, "model": _object(job.model)}
    if job.data is not None:
        sections["data"] = _object(job.data)
    sections["trainer"] = _without_secrets(_trainer(job), "trainer", secrets)
    sections["ckpt_path"] = job.file.ckpt_path
    notes = "".join(f"# {name} is left out, as it looks like a secret\n" for name in secrets)
    return notes + yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


# --- Objects -----------------------------------------------------------------------------------------------------


def _object(plan: Plan) -> dict[str, Any]:
    defaults = {
        name: plain(each.default)
        for name, each in parameters(plan.target).items()
        if each.default is not each.empty and name not in plan.arguments and each.kind is not each.POSITIONAL_ONLY
    }
    given = {name: plan.paths.get(name) or _data(value) for name, value in plan.arguments.items()}
    if plan.partial:
        defaults = {}  # the receiver sets the other arguments
    known = {name: value for name, value in defaults.items() if value is not _UNSUPPORTED}
    arguments = {name: given.get(name, known.get(name)) for name in [*_ordered(plan, given, known)]}
    return {"class_path": plan.class_path, "init_args": arguments} if plan.class_path else arguments


def _ordered(plan: Plan, given: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    names = [name for name in parameters(plan.target) if name in given or name in known]
    return [*names, *(name for name in given if name not in names)]


def _data(value: Any) -> Any:
    if isinstance(value, Plan):
        return _object(value)
    if isinstance(value, dict):
        return {key: _data(each) for key, each in value.items()}
    return [_data(each) for each in value] if isinstance(value, list) else plain(value)


def plain(value: Any) -> Any:
    """Return `value` as a run file expresses it, or `_UNSUPPORTED`."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        items = {key: plain(each) for key, each in value.items()}
        return _UNSUPPORTED if _UNSUPPORTED in items.values() else items
    if isinstance(value, list | tuple | set | frozenset):
        each = [plain(item) for item in value]
        return _UNSUPPORTED if any(item is _UNSUPPORTED for item in each) else each
    return _path_of(value) if isinstance(value, type) or inspect.isroutine(value) else _UNSUPPORTED


def _path_of(value: Any) -> Any:
    """Return the import path of a class or function, or `_UNSUPPORTED`."""
    path = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    try:
        return path if find(path, "", "") is value else _UNSUPPORTED
    except (ConfigError, ImportError):
        return _UNSUPPORTED


# --- The trainer -------------------------------------------------------------------------------------------------


def _trainer(job: Job) -> dict[str, Any]:
    file, line = job.file.trainer
    settings = gather(TrainerSettings, {}, [file, from_environment(), line])
    arguments: dict[str, Any] = {}
    for name in option_names(TrainerSettings):
        value = settings.chosen.get(name) if name in added_arguments(TrainerSettings) else getattr(settings, name)
        options = settings.options.get(registry.arguments().get(name, ""), {})
        if name == "default_root_dir" and name not in settings.origins:
            value = "."  # the working directory of any run
        if options and isinstance(value, str) and value != "auto":
            value = {"name": value, **_parsed(registry.arguments()[name], value, options)}
        elif options:
            kind = registry.arguments()[name]
            arguments |= {f"{kind}.{option}": plain(_guess(each)) for option, each in options.items()}
        arguments[name] = plain(value)
    return arguments


def _parsed(kind: str, name: str, options: Mapping[str, PluginOption]) -> dict[str, Any]:
    """Return `options` of the plugin called `name`; text is parsed by the type of the option."""
    if not any(option.text for option in options.values()):
        return {name: option.value for name, option in options.items()}
    types = option_types(class_of(registry.find(kind, name)))
    return {
        option: convert(each.value, types[option], f"{kind}.{option}", text=True)
        if each.text and option in types
        else each.value
        for option, each in options.items()
    }


def _guess(option: PluginOption) -> Any:
    return parse_text(option.value) if option.text else option.value


def _without_secrets(value: Any, path: str, left_out: list[str]) -> Any:
    """Return `value` without the items of mappings that should not be shown; their names go to `left_out`."""
    if isinstance(value, list):
        return [_without_secrets(each, f"{path}[{index}]", left_out) for index, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, each in value.items():
        inner = f"{path}.{name}"
        if not isinstance(each, dict | list) and redact(str(name), each) != each:
            left_out.append(inner)
        else:
            kept[name] = _without_secrets(each, inner, left_out)
    return kept
