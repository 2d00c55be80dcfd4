"""Files of checkpoints that a callback keeps: below a folder, linked, removed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.api.paths import is_remote
from stratagem.checkpoint.files import sidecar
from stratagem.errors import CheckpointError


def within(folder: Path, path: str) -> str:
    """Return `path` as a path under `folder`; "" if it is not below it."""
    if not path or is_remote(folder):
        return path if path.startswith(f"{folder}/") else ""
    # The folder's own links are followed, and not that of ``last``.
    below = os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)),
                            os.path.realpath(folder))  # fmt: skip
    return "" if below.startswith(os.pardir) else str(folder / below)


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
