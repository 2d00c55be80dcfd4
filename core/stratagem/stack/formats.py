"""Find the installed checkpoint format that reads a file, and the newest complete checkpoint of a folder."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.api.paths import as_path, refusals
from stratagem.checkpoint.files import STAGED, check_version
from stratagem.checkpoint.own_memory import with_own_memory
from stratagem.checkpoint.single_process import SingleProcessRun
from stratagem.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from stratagem.api.kinds import CheckpointFormat


def newest_whole(
    folder: Path, checkpoint_format: CheckpointFormat, accept: Callable[[Path], bool] | None = None
) -> Path | None:
    """Return the newest checkpoint in `folder` that verifies, in any installed format; None if there is none.

    With `accept`, only those for whose path it returns True. Warns about damaged ones. `checkpoint_format` is tried
    first; others are imported only for a path that it does not recognise.
    """
    with refusals(folder, "listed"):
        if not folder.is_dir():
            return None
        found = sorted(_candidates(folder, checkpoint_format), key=lambda candidate: -_age(*candidate))
    found = [candidate for candidate in found if accept is None or accept(candidate[0])]
    for path, form in found:
        if form.is_whole(path):
            return path
        warnings.warn(f"{path} is damaged: an older checkpoint is taken instead", stacklevel=2)
    return None


def saved_at(path: Path, checkpoint_format: CheckpointFormat) -> float:
    """Return when `path` was saved, in seconds since 1970; 0 if unknown."""
    return _age(path, format_of(path, checkpoint_format))


def read_any(path: str | Path, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint in this process, with the installed format that recognises it.

    Args:
        trust: also read one with pickles, which may execute code.

    Raises:
        CheckpointError: no such file, no format recognises it, it is damaged, or it has pickles and `trust` is False.
    """
    path = as_path(path)
    with refusals(path, "read"):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist", expected="a checkpoint", do="check the path")
    name = name_of_format(path)
    if name is None and path.is_dir():
        check_is_not_folder(path)
    if name is None:
        raise CheckpointError(f"{path} is not in an installed checkpoint format", do="see `stratagem plugins list`")
    checkpoint_format = format_named(name)
    if checkpoint_format.reads_pickles and not trust:
        raise CheckpointError(
            f"{path} contains pickles, and loading a pickle can execute any code",
            expected="files that only you, or people you trust, have written",
            do="if you trust them, `stratagem checkpoint consolidate --trust DIR FILE` writes a file without pickles",
        )
    if checkpoint_format.reads_pickles:
        state = checkpoint_format.consolidate(path)
    else:
        state = read_with(checkpoint_format, path, SingleProcessRun())
    check_version(state, path)
    return with_own_memory(state)


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
    from stratagem.stack import registry

    for entry in registry.entries("checkpoint"):
        with contextlib.suppress(PluginError):  # a broken package must not hide the others
            if _recognises(format_named(entry.qualified_name), path):
                return entry.qualified_name
    return None


def format_of(path: Path, preferred: CheckpointFormat) -> CheckpointFormat:
    """Return the installed format that recognises `path`; `preferred` if it does, or if none does."""
    if _recognises(preferred, path):
        return preferred
    name = name_of_format(path)
    return preferred if name is None else format_named(name)


def format_named(name: str) -> CheckpointFormat:
    """Return the checkpoint format of that name, with its default options."""
    from stratagem.stack import registry
    from stratagem.stack.construction import make

    checkpoint_format: CheckpointFormat = make(registry.find("checkpoint", name), {})
    return checkpoint_format


def read_with(checkpoint_format: CheckpointFormat, path: Path, run: Any) -> dict[str, Any]:
    """Read `path` with a format that is not the run's own."""
    state: dict[str, Any] = _call(checkpoint_format, "load_checkpoint", path=path, into=None, run=run)
    return state


def write_with(checkpoint_format: CheckpointFormat, state: dict[str, Any], path: Path, run: Any) -> None:
    """Write `state` to `path` with a format that is not the run's own."""
    _call(checkpoint_format, "save_checkpoint", state=state, path=path, run=run)
    run.wait_for_saves()


def _call(plugin: Any, hook: str, **given: Any) -> Any:
    """Call an implementation of `hook` with those of the `given` arguments that it takes."""
    function = getattr(plugin, hook)
    accepted = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in accepted})


def _candidates(folder: Path, checkpoint_format: CheckpointFormat) -> Iterator[tuple[Path, CheckpointFormat]]:
    """Yield the checkpoints in `folder`, each with the format that recognises it."""
    formats = [checkpoint_format]
    for path in folder.iterdir():
        if path.name.endswith((STAGED, ".sum")):
            continue
        if len(formats) == 1 and not _recognises(checkpoint_format, path) and not path.name.startswith("."):
            formats += _installed_formats()
        form = next((form for form in formats if _recognises(form, path)), None)
        if form is not None:
            yield path, form


def _recognises(checkpoint_format: CheckpointFormat, path: Path) -> bool:
    with contextlib.suppress(OSError):  # an unreadable path does not count as a checkpoint
        return checkpoint_format.recognises(path)
    return False


def _installed_formats() -> Iterator[CheckpointFormat]:
    from stratagem.stack import registry

    for entry in registry.entries("checkpoint"):
        with contextlib.suppress(PluginError):  # a broken package must not hide the others
            yield format_named(entry.qualified_name)


def _age(path: Path, checkpoint_format: CheckpointFormat) -> float:
    with contextlib.suppress(OSError):  # another process may be deleting it
        return checkpoint_format.saved_at(path)
    return 0
