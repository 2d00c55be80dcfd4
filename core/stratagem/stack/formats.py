"""Find the installed checkpoint format that reads a file."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.api.paths import refusals
from stratagem.discovery import registry
from stratagem.errors import CheckpointError, PluginError
from stratagem.stack.construction import make

if TYPE_CHECKING:
    from stratagem.api.kinds import CheckpointFormat


def check_is_not_folder(path: Path) -> None:
    """Refuse a folder that no format recognises, and name the checkpoints in it."""
    with refusals(path, "read"):
        if not path.is_dir():
            return
        inside = sorted(each.name for each in path.iterdir() if name_of_format(each) is not None)
    raise CheckpointError(
        f"{path} is a folder and not a checkpoint", expected="a checkpoint that an installed format wrote",
        do=f"pass one of those in it: {', '.join(inside)}" if inside else "check the path",
    )  # fmt: skip


def name_of_format(path: Path) -> str | None:
    """Return the name of the first installed checkpoint format that recognises `path`; None if none does."""
    return next((name for name, form in installed_formats() if recognises(form, path)), None)


def format_of(path: Path, preferred: CheckpointFormat) -> CheckpointFormat:
    """Return the installed format that recognises `path`; `preferred` if it does, or if none does."""
    if recognises(preferred, path):
        return preferred
    name = name_of_format(path)
    return preferred if name is None else format_named(name)


def format_named(name: str) -> CheckpointFormat:
    """Return the checkpoint format of that name, with its default options."""
    checkpoint_format: CheckpointFormat = make(registry.find("checkpoint", name), {})
    return checkpoint_format


def read_with(checkpoint_format: CheckpointFormat, path: Path, run: Any) -> dict[str, Any]:
    """Read `path` with a format that is not the run's own."""
    state: dict[str, Any] = _call(checkpoint_format, "load_checkpoint", path=path, run=run)
    return state


def write_with(checkpoint_format: CheckpointFormat, state: dict[str, Any], path: Path, run: Any) -> None:
    """Write `state` to `path` with a format that is not the run's own."""
    _call(checkpoint_format, "save_checkpoint", state=state, path=path, run=run)
    run.saver.wait()


def _call(plugin: Any, hook: str, **given: Any) -> Any:
    """Call an implementation of `hook` with those of the `given` arguments that it takes."""
    function = getattr(plugin, hook)
    accepted = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in accepted})


def recognises(checkpoint_format: CheckpointFormat, path: Path) -> bool:
    """Whether `path` is in `checkpoint_format`."""
    with contextlib.suppress(OSError):  # an unreadable path does not count as a checkpoint
        return checkpoint_format.recognises(path)
    return False


def installed_formats() -> Iterator[tuple[str, CheckpointFormat]]:
    """Yield the checkpoint formats that can be imported, each with its name."""
    for entry in registry.entries("checkpoint"):
        with contextlib.suppress(PluginError):  # a broken package must not hide the others
            yield entry.qualified_name, format_named(entry.qualified_name)
