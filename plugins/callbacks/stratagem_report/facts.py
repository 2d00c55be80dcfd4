"""Collect the content of the page besides its curves, as plain data without secrets."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import frozen

from stratagem.api.options import options, redact
from stratagem.errors import shown as in_words
from stratagem_report.origin import origin, written_files
from stratagem_trainer.api import has_role

if TYPE_CHECKING:
    from pathlib import Path

    from stratagem_layout import Layout
    from stratagem_report.history import History
    from stratagem_trainer.api import TrainerView

_MAX_LENGTH = 400
#: When a page was written.
TIME = "%Y-%m-%d %H:%M:%S %z"


@frozen(kw_only=True)
class Facts:
    """The facts about a run that the page shows."""

    #: Class name of the module.
    module: str
    history: History
    epochs: int
    max_epochs: int | None
    steps: int
    max_steps: int
    skipped_steps: int
    device: str
    world_size: int
    batch_size: int | None
    #: What the strategy tells about its mesh, if it does.
    layout: Layout | None
    #: The titles and the rows of a table: how long each rank takes; None if no callback measures it.
    rank_times: tuple[list[str], list[list[str]]] | None
    written_at: str
    folder: str
    #: (title, path, address relative to the page) of the files of the run that exist.
    files: list[tuple[str, str, str]]
    #: (name, text): the command line, and the commit of the folder in which it was given.
    origin: list[tuple[str, str]]
    #: (name, value, origin) of all arguments except those that choose plugins.
    arguments: list[tuple[str, str, str]]
    #: As `RunContext.describe` returns them.
    plugins: list[dict[str, Any]]
    hyper_parameters: list[tuple[str, str]]
    versions: list[tuple[str, str]]


def gather(trainer: TrainerView, history: History, page: Path) -> Facts:
    """Return the facts about the run of `trainer`, for the page that is written to `page`."""
    run, settings, position = trainer.run, trainer.settings, trainer.position
    return Facts(
        module=type(trainer.module).__name__, history=history, epochs=position.epoch + bool(position.epoch_done),
        max_epochs=settings.max_epochs if (settings.max_epochs or 0) >= 0 else None, steps=trainer.global_step,
        max_steps=settings.max_steps, skipped_steps=position.skipped_steps, device=_device_name(run.device),
        world_size=trainer.world_size, batch_size=trainer.effective_batch_size,
        layout=run.strategy.layout(run.peers_world, trainer.module),
        rank_times=next((each.rank_times() for each in trainer.callbacks if has_role(each, "rank-times")), None),
        written_at=time.strftime(TIME), folder=str(settings.default_root_dir), files=written_files(trainer, page),
        origin=origin(), arguments=_arguments(settings), plugins=run.describe()["plugins"],
        hyper_parameters=[pair for name, value in trainer.module.hparams.items() for pair in _flat(str(name), value)],
        versions=_versions(),
    )  # fmt: skip


# --- Outcome -----------------------------------------------------------------------------------------------------


def ending(trainer: TrainerView) -> dict[str, Any]:
    """Return the outcome of a fit that ended without an exception."""
    return {"status": "Finished", "detail": trainer.outcome.reason}


def failure(trainer: TrainerView, exception: BaseException) -> dict[str, Any]:
    """Return the outcome of a fit that `exception` ended, with its traceback, but without source lines."""
    frames = traceback.extract_tb(exception.__traceback__)
    if isinstance(exception, KeyboardInterrupt | SystemExit):
        by = "Ctrl-C" if isinstance(exception, KeyboardInterrupt) else trainer.outcome.reason or "SystemExit"
        return {"status": "Interrupted", "detail": f"by {by}"}
    return {
        "status": "Failed",
        "detail": f"with {type(exception).__name__}",
        "error": redact("message", _short(str(exception), 4000)),
        "frames": [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in frames[-30:]],
    }


# --- Samples -----------------------------------------------------------------------------------------------------


def learning_rates(optimizers: list[Any]) -> Iterator[tuple[str, float]]:
    """Yield the learning rate of each parameter group of `optimizers`, with a unique name."""
    for number, optimizer in enumerate(optimizers, 1):
        name = type(optimizer).__name__ + (f" #{number}" if len(optimizers) > 1 else "")
        groups = optimizer.param_groups
        for index, group in enumerate(groups, 1):
            yield (f"{name}, group {index}" if len(groups) > 1 else name), float(group["lr"])


def memory_used(device: torch.device) -> dict[str, int]:
    """Return the bytes that this process uses on the host and on its device, if it has one."""
    used = dict([_host_memory()])
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        for name, function_name in _DEVICE_MEMORY.items():
            if callable(function := getattr(backend, function_name, None)):
                used[name] = int(function())
    return used


_DEVICE_MEMORY = {
    "device, allocated": "memory_allocated", "device, peak so far": "max_memory_allocated",
    "device, in use": "current_allocated_memory",
}  # fmt: skip


def _host_memory() -> tuple[str, int]:
    try:
        with open("/proc/self/statm", "rb") as file:
            return "host", int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return "host, peak so far", peak if sys.platform == "darwin" else peak * 1024


# --- Arguments and hyper-parameters ------------------------------------------------------------------------------


def _arguments(settings: Any) -> list[tuple[str, str, str]]:
    """Return all arguments; those that were set come first."""
    rows = [
        (name, shown(name, getattr(settings, option.name)), settings.origins.get(name, "default"))
        for name, option in options(type(settings)).items()
        if name not in settings.plugin_arguments
    ]
    return sorted(rows, key=lambda row: (row[2] == "default", row[0]))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of `value`; items of a mapping get dotted names."""
    value = redact(name, _plain(value))
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, shown(name, value)


def shown(name: str, value: Any) -> str:
    """Return `value` as text, without secrets."""
    value = redact(name, _plain(value))
    try:
        text = value if isinstance(value, str) else in_words(value, None)
    except Exception as error:  # noqa: BLE001 - user code
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return _short(str(redact("value", text)), _MAX_LENGTH)


def _plain(value: Any, depth: int = 8) -> Any:
    """Return `value` with objects that have named fields as dicts, so that secrets can be found by name."""
    parts = _parts(value) if depth else None
    if parts is not None:
        return {key: _plain(item, depth - 1) for key, item in parts.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item, depth - 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _parts(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if hasattr(value, "_asdict") and isinstance(value, tuple):
        named: Any = value  # a named tuple
        return {**named._asdict()}
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    if attrs.has(type(value)):
        return {each.name: getattr(value, each.name, None) for each in attrs.fields(type(value))}
    return None


def _short(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]} … ({len(text):,} characters)"


# --- Environment -------------------------------------------------------------------------------------------------


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return device.type


def _versions() -> list[tuple[str, str]]:
    return [
        ("stratagem", importlib.metadata.version("stratagem-core")),
        ("torch", str(torch.__version__)),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        ("CPU cores", str(os.cpu_count())),
    ]
