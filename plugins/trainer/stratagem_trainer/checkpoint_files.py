"""Find the newest complete checkpoint of a folder, and read one of any format without a run."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stratagem.api.kinds import CheckpointFormat
from stratagem.api.paths import as_path, is_remote, refusals
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.files import STAGED, check_version
from stratagem.checkpoint.tensor_memory import with_own_memory
from stratagem.errors import CheckpointError
from stratagem.stack.formats import (
    check_is_not_folder,
    format_named,
    format_of,
    installed_formats,
    name_of_format,
    read_with,
    recognises,
)

#: Endings of files beside checkpoints.
_NOT_CHECKPOINTS = (STAGED, ".sum")


def newest_whole(
    folder: Path, checkpoint_format: CheckpointFormat, accept: Callable[[Path], bool] | None = None
) -> Path | None:
    """Return the newest checkpoint in `folder` that verifies, in any installed format; None if there is none.

    With `accept`, only those for whose path it returns True. Warns about damaged ones. `checkpoint_format` is tried
    first; others are imported only for a path that it does not recognise. Of local files none is opened that is older
    than the result.
    """
    found = _newest_first(folder, checkpoint_format)
    while True:
        with refusals(folder, "listed"):
            path, form = next(found, (None, checkpoint_format))
        if path is None:
            return None
        if accept is not None and not accept(path):
            continue
        if form.is_whole(path):
            return path
        warnings.warn(f"{path} is damaged: an older checkpoint is taken instead", stacklevel=2)


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


def _newest_first(folder: Path, checkpoint_format: CheckpointFormat) -> Iterator[tuple[Path, CheckpointFormat]]:
    """Yield the checkpoints in `folder` from the newest on, each with the format that recognises it.

    The heap has a bound for each name: no checkpoint there was saved later. When all others are older, the format is
    looked for; with the time that it tells, the name is put back if that is below the bound. Those of the same time
    are in the order of the listing.
    """
    if not folder.is_dir():
        return
    formats = [checkpoint_format]
    waiting: list[tuple[float, int, str, CheckpointFormat | None]] = [
        (-bound, number, name, None) for number, (name, bound) in enumerate(_with_bounds(folder, checkpoint_format))
    ]
    heapq.heapify(waiting)
    while waiting:
        bound, number, name, form = heapq.heappop(waiting)
        path = folder / name
        if form is None and (form := _format_among(formats, path)) is not None and (age := _age(path, form)) < -bound:
            heapq.heappush(waiting, (-age, number, name, form))
        elif form is not None:
            yield path, form


def _with_bounds(folder: Path, checkpoint_format: CheckpointFormat) -> Iterator[tuple[str, float]]:
    """Yield the names in `folder` that checkpoints may have, each with a time after which none was saved there."""
    if is_remote(folder):  # only the format asks the store for the time, of what it recognises
        yield from ((path.name, math.inf) for path in folder.iterdir() if not path.name.endswith(_NOT_CHECKPOINTS))
        return
    asked = None if type(checkpoint_format).saved_at is CheckpointFormat.saved_at else checkpoint_format
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(_NOT_CHECKPOINTS):
                yield entry.name, _bound(entry, 0 if asked is None else _age(folder / entry.name, asked))


def _bound(entry: os.DirEntry[str], age: float) -> float:
    """Return a time after which no checkpoint was saved at `entry`, whose age is `age`; infinity if none is known."""
    try:
        return max(entry.stat().st_mtime_ns / 1e9, age) if entry.is_file() else age or math.inf
    except OSError:  # another process may be deleting it
        return math.inf


def _format_among(formats: list[CheckpointFormat], path: Path) -> CheckpointFormat | None:
    """Return which of `formats` recognises `path`; the others that are installed are added when they are needed."""
    if recognises(formats[0], path):
        return formats[0]
    if len(formats) == 1 and not path.name.startswith("."):
        formats += (form for _, form in installed_formats())
    return next((form for form in formats[1:] if recognises(form, path)), None)


def _age(path: Path, checkpoint_format: CheckpointFormat) -> float:
    with contextlib.suppress(OSError):  # another process may be deleting it
        return checkpoint_format.saved_at(path)
    return 0
