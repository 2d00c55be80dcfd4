"""Everything the page says about a run besides its curves, as plain data; secrets are gone from here on."""

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

from stratagem.api.options import options
from stratagem.api.redaction import redact

if TYPE_CHECKING:
    from stratagem.api import TrainerView
    from stratagem_report.history import History

_LONGEST = 400


@frozen(kw_only=True)
class Facts:
    """What is known of a run."""

    #: Class of the module that was trained.
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
    written_at: str
    folder: str
    #: (name, value, origin) of every argument but those that choose plugins.
    arguments: list[tuple[str, str, str]]
    #: As `RunContext.describe` returns them.
    plugins: list[dict[str, Any]]
    hyper_parameters: list[tuple[str, str]]
    versions: list[tuple[str, str]]


def gather(trainer: TrainerView, history: History) -> Facts:
    """Return the facts of the run that `trainer` drives."""
    run, settings, position = trainer.run, trainer.settings, trainer.position
    return Facts(
        module=type(trainer.module).__name__,
        history=history,
        epochs=position.epoch + bool(position.epoch_done),
        max_epochs=settings.max_epochs if (settings.max_epochs or 0) >= 0 else None,
        steps=trainer.global_step,
        max_steps=settings.max_steps,
        skipped_steps=position.skipped_steps,
        device=_device_name(run.device),
        world_size=trainer.world_size,
        batch_size=trainer.effective_batch_size,
        written_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        folder=str(settings.default_root_dir),
        arguments=_arguments(settings),
        plugins=run.describe()["plugins"],
        hyper_parameters=[pair for name, value in trainer.module.hparams.items() for pair in _flat(str(name), value)],
        versions=_versions(),
    )


# --- How it ended ------------------------------------------------------------------------------------------------


def ending(trainer: TrainerView) -> dict[str, Any]:
    """Return the outcome of a fit that ended by itself."""
    settings = trainer.settings
    if 0 <= settings.max_steps <= trainer.global_step:
        detail = f"max_steps={settings.max_steps} reached"
    elif settings.max_epochs is not None and 0 <= settings.max_epochs <= trainer.current_epoch:
        detail = f"max_epochs={settings.max_epochs} reached"
    elif trainer.should_stop:
        detail = "stopped before its limits (should_stop)"
    else:
        detail = "max_time reached" if trainer.settings.max_time is not None else ""
    return {"status": "Finished", "detail": detail}


def failure(exception: BaseException) -> dict[str, Any]:
    """Return the outcome of a fit that `exception` ended: where it came from, without the source's own words."""
    frames = traceback.extract_tb(exception.__traceback__)
    stopped = isinstance(exception, KeyboardInterrupt | SystemExit)
    return {
        "status": "Interrupted" if stopped else "Failed",
        "detail": f"by {type(exception).__name__}" if stopped else f"with {type(exception).__name__}",
        "error": redact("message", _short(str(exception), 4000)),
        "frames": [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in frames[-30:]],
    }


# --- What it read while running ----------------------------------------------------------------------------------


def learning_rates(optimizers: list[Any]) -> Iterator[tuple[str, float]]:
    """Yield the learning rate of each parameter group of `optimizers`, with a name that tells them apart."""
    for number, optimizer in enumerate(optimizers, 1):
        name = type(optimizer).__name__ + (f" #{number}" if len(optimizers) > 1 else "")
        groups = optimizer.param_groups
        for index, group in enumerate(groups, 1):
            yield (f"{name}, group {index}" if len(groups) > 1 else name), float(group["lr"])


def memory_held(device: torch.device) -> dict[str, int]:
    """Return bytes held by this process: on the host and, if it has one, on its device."""
    held = dict([_host_memory()])
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        for name, question in _DEVICE_MEMORY.items():
            if callable(answer := getattr(backend, question, None)):
                held[name] = int(answer())
    return held


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


# --- What it was told --------------------------------------------------------------------------------------------


def _arguments(settings: Any) -> list[tuple[str, str, str]]:
    """Return every argument: those that were set first."""
    rows = [
        (name, shown(name, getattr(settings, option.name)), settings.origins.get(name, "default"))
        for name, option in options(type(settings)).items()
        if name not in settings.plugin_arguments
    ]
    return sorted(rows, key=lambda row: (row[2] == "default", row[0]))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield `value` under `name`, or if it is a mapping what is in it under dotted names."""
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
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # noqa: BLE001 - somebody else's __repr__
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return _short(str(redact("value", text)), _LONGEST)


def _plain(value: Any, depth: int = 8) -> Any:
    """Return `value` with everything that has named parts as a dict, so that the names can be judged."""
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


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text):,} characters)"


# --- Where it ran ------------------------------------------------------------------------------------------------


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return device.type


def _versions() -> list[tuple[str, str]]:
    return [
        ("stratagem", importlib.metadata.version("stratagem")),
        ("torch", str(torch.__version__)),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        ("CPU cores", str(os.cpu_count())),
    ]
