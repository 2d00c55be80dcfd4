"""The actions of ``stratagem checkpoint``: inspect, verify, diff, convert and consolidate."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.api.paths import as_path
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.rank_rows import ranks_in
from stratagem.discovery import registry
from stratagem.errors import CheckpointError, ConfigError
from stratagem.stack.construction import make
from stratagem.stack.formats import format_named, name_of_format, read_with, write_with
from stratagem_checkpoint_tools.exports import write_huggingface, write_state_dict
from stratagem_trainer.checkpoint_files import read_any

# --- inspect -----------------------------------------------------------------------------------------------------


def inspect(arguments: argparse.Namespace) -> int:
    path = as_path(arguments.path)
    state = read_any(path, arguments.trust)
    tensors = {name: value for name, value in state["state_dict"].items() if hasattr(value, "shape")}
    lightnings = {key: state[key] for key in ("epoch", "global_step") if key in state}
    progress = state.get("loop", lightnings)
    report = {
        "path": str(path),
        "bytes": _size(path),
        "format": state.get("format", {}),
        "model": [
            {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in tensors.items()
        ],
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "optimizers": [len(each.get("state", {})) for key in _OPTIMIZERS for each in state.get(key, [])],
        "lr_schedulers": len(state.get("lr_schedulers", [])),
        "loop": {key: value for key, value in progress.items() if isinstance(value, int | float | str)},
        "plugins": sorted([*state.get("callbacks", {}), *state.get("plugins", {})]),
        "hyper_parameters": {key: repr(value) for key, value in state.get("hyper_parameters", {}).items()},
    }
    print(json.dumps(report, indent=2) if arguments.json else _render(report))
    return 0


def _render(report: dict[str, Any]) -> str:
    made_by = report["format"].get("stratagem")
    lines = [
        f"{report['path']}: {report['bytes'] / 1e6:.1f} MB" + (f", by stratagem {made_by}" if made_by else ""),
        f"model: {len(report['model'])} tensors, {report['parameters']:,} elements",
        *(f"  {t['name']}  {t['dtype']} {tuple(t['shape'])}" for t in report["model"]),
    ]
    if report["optimizers"]:
        lines.append(f"optimizers: with the state of {', '.join(map(str, report['optimizers']))} parameters")
    lines += [
        f"{title}: " + ", ".join(f"{key} {value}" for key, value in report[title].items())
        for title in ("loop", "hyper_parameters")
        if report[title]
    ]
    if report["plugins"]:
        lines.append(f"state of plugins: {', '.join(report['plugins'])}")
    return "\n".join(lines)


# --- verify ------------------------------------------------------------------------------------------------------


def verify(arguments: argparse.Namespace) -> int:
    rows = [{"path": path, "problem": _problem(as_path(path))} for path in arguments.paths]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['path']}: {row['problem'] or 'whole'}")
    return int(any(row["problem"] for row in rows))


def _problem(path: Path) -> str:
    """Return the problem of the checkpoint at `path` as a sentence; an empty string if there is none."""
    if not path.exists():
        return str(CheckpointError(f"{path} does not exist"))
    formats = [make(entry, {}) for entry in registry.entries("checkpoint")]
    if any(each.recognises(path) and each.is_whole(path) for each in formats):
        return ""
    name = name_of_format(path)
    try:
        read_any(path) if name is None else read_with(format_named(name), path, SingleProcessRun())
    except CheckpointError as error:
        return str(error)
    return "its checksum differs from what was written."


# --- diff --------------------------------------------------------------------------------------------------------


def diff(arguments: argparse.Namespace) -> int:
    one, other = (_with_ranks(read_any(path, arguments.trust), path) for path in (arguments.path, arguments.other))
    rows = list(_differences(one, other, arguments.tolerance))
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['place']}: {row['difference']}")
        print(f"{len(rows)} differences" if rows else "no difference")
    return int(bool(rows))


def _with_ranks(state: dict[str, Any], path: str) -> dict[str, Any]:
    """Return `state` with what ranks saved as a list, whichever form the format has."""
    return {key: list(ranks_in(state, path)) if key == "ranks" else value for key, value in state.items()}


def _differences(one: Any, other: Any, tolerance: float, place: str = "") -> Iterator[dict[str, str]]:
    """Yield a row for each difference of two states."""
    import torch

    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{place}.{key}".lstrip(".")
            if key not in one or key not in other:
                yield {"place": inner, "difference": f"only in the {'first' if key in one else 'second'}"}
            else:
                yield from _differences(one[key], other[key], tolerance, inner)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _differences(first, second, tolerance, f"{place}[{index}]")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if difference := _of_tensors(one, other, tolerance):
            yield {"place": place, "difference": difference}
    elif type(one) is not type(other) or (one != other and one == one):
        yield {"place": place, "difference": f"{_short(one)} and {_short(other)}"}


def _of_tensors(one: Any, other: Any, tolerance: float) -> str:
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}".replace("torch.", "")
    if torch.equal(one, other):
        return ""
    distance, norm = float((one.double() - other.double()).norm()), float(one.double().norm())
    relative = distance / norm if norm else distance
    return "" if relative <= tolerance else f"values differ by {relative:.1e} of their norm"


# --- convert -----------------------------------------------------------------------------------------------------


def convert(arguments: argparse.Namespace) -> int:
    source, target = as_path(arguments.path), as_path(arguments.to)
    name = arguments.format or _format_for(target)
    if arguments.max_shard_size is not None and name != "huggingface":
        raise ConfigError(
            f"--max-shard-size is set with --to {name}", expected="--to huggingface", do="remove it, or change --to"
        )
    export = {"huggingface": write_huggingface, "state_dict": write_state_dict}.get(name)
    checkpoint_format = format_named("full" if export else name)
    if target.exists():
        raise CheckpointError(f"{target} exists", expected="a new path", do="choose another path; nothing was changed")
    state = renamed(read_any(source, arguments.trust), arguments.rename)
    if export:
        weights = {key: value for key, value in state["state_dict"].items() if hasattr(value, "shape")}
        export(target, weights, arguments.max_shard_size)
    else:
        if arguments.weights_only:
            state = {key: value for key, value in state.items() if key in ("state_dict", "format", "hyper_parameters")}
        write_with(checkpoint_format, state, target, SingleProcessRun())
    print(f"{target}: {_size(target) / 1e6:.1f} MB")
    return 0


def renamed(state: dict[str, Any], rules: Sequence[str]) -> dict[str, Any]:
    """Return `state` with the names of parameters changed by `rules`, in their order, in weights and optimizers.

    Args:
        rules: each is ``OLD=NEW``. OLD is the beginning of a name, or with a character that only a regular expression
            has, one that is replaced wherever it matches.

    Raises:
        ConfigError: a rule has no "=", or two parameters get one name.
    """
    changes = [_change(rule) for rule in rules]

    def new(name: str) -> str:
        for pattern, replacement in changes:
            name = pattern.sub(replacement, name)
        return name

    def mapped(items: Mapping[Any, Any]) -> dict[Any, Any]:
        result = {new(key) if isinstance(key, str) else key: value for key, value in items.items()}
        if len(result) < len(items):
            raise ConfigError(f"--rename {' '.join(rules)} gives two parameters one name", expected="different names")
        return result

    def of_optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, "params": [new(key) if isinstance(key, str) else key for key in group["params"]]}
            for group in saved["param_groups"]
        ]
        return {**saved, "state": mapped(saved["state"]), "param_groups": groups}

    if not changes:
        return state
    optimizers = {key: [of_optimizer(each) for each in state[key]] for key in _OPTIMIZERS if key in state}
    return state | {"state_dict": mapped(state["state_dict"])} | optimizers


#: Where stratagem and Lightning have the states of optimizers.
_OPTIMIZERS = ("optimizers", "optimizer_states")


def _change(rule: str) -> tuple[re.Pattern[str], str]:
    old, equals, replacement = rule.rpartition("=")
    if not equals:
        raise ConfigError(f"--rename {rule}", expected="OLD=NEW, such as model.=transformer.")
    try:
        return re.compile(old if set(old) & set(r"^$*+?()[]{}|\\") else f"^{re.escape(old)}"), replacement
    except re.error as error:
        raise ConfigError(f"--rename {rule}: {error}", expected="a regular expression before the =") from error


def _format_for(target: Path) -> str:
    """Return the name of the only format with the suffix of `target`."""
    known = {entry.name: format_named(entry.qualified_name) for entry in registry.entries("checkpoint")}
    formats = {name: each for name, each in known.items() if not each.reads_pickles}
    fitting = [name for name, each in formats.items() if each.suffix == target.suffix]
    if len(fitting) != 1:
        raise ConfigError(
            f"{target.name} could be {' or '.join(fitting) or 'anything'}", expected="a format",
            do=f"add --to with one of {', '.join([*formats, 'huggingface', 'state_dict'])}",
        )  # fmt: skip
    return fitting[0]


# --- Helpers -----------------------------------------------------------------------------------------------------


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
