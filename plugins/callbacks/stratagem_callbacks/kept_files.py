"""Files of checkpoints that a callback keeps: below a folder, linked, removed."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from stratagem.api.paths import is_remote
from stratagem.checkpoint.files import sidecar
from stratagem.errors import CheckpointError

#: Names to try before the folder is listed, which takes less time than one more call for each.
_PROBES = 16


def within(folder: Path, path: str) -> str:
    """Return `path` as a path under `folder`; "" if it is not below it."""
    if not path or is_remote(folder):
        return path if path.startswith(f"{folder}/") else ""
    # The folder's own links are followed, and not that of ``last``.
    below = os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)),
                            os.path.realpath(folder))  # fmt: skip
    return "" if below.startswith(os.pardir) else str(folder / below)


def free_version(first: Path, suffix: str, usable: Collection[str] = ()) -> Path:
    """Return `first`, or with ``-v1``, ``-v2`` ... before `suffix` the next that does not exist or is in `usable`."""
    stem = first.name.removesuffix(suffix)
    for version in itertools.count():
        path = first.with_name(f"{stem}-v{version}{suffix}") if version else first
        if str(path) in usable or not path.exists():
            return path
        if version == _PROBES and not is_remote(first):
            break
    folder = str(first.parent)
    taken = _names_in(first.parent) - {name for head, name in map(os.path.split, usable) if head == folder}
    names = (f"{stem}-v{version}{suffix}" for version in itertools.count(_PROBES))
    return first.with_name(next(name for name in names if name not in taken))


def _names_in(folder: Path) -> set[str]:
    """Return the names in `folder`, without links to nothing."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if not entry.is_symlink() or os.path.exists(entry.path)}


def link_to(format_of: Callable[[Path], Any], link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, and so the checksum beside it; a checkpoint of that name is removed."""
    if link.exists() and not link.is_symlink():
        remove(format_of, link)
    for name, file in ((link, target), (sidecar(link), sidecar(target))):
        staged = name.with_name(f"{name.name}.link")
        if file.exists():
            staged.unlink(missing_ok=True)
            staged.symlink_to(os.path.relpath(file, name.parent))
            staged.replace(name)


def remove(format_of: Callable[[Path], Any], path: Path) -> None:
    try:
        written_in = format_of(path)
        if written_in.recognises(path):
            written_in.remove(path)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{path} could not be deleted ({error})", stacklevel=2)
