"""The folder into which a logger writes the files of a run: ``<save_dir>/<name>/version_N``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from stratagem.api.paths import as_path


def destination(logger: Any, root: Path) -> Path:
    """Return the folder of a run, or the parent of all versions if the logger's `version` is not set.

    Args:
        logger: has `save_dir`, `name` and `version`.
        root: the ``default_root_dir`` of the run.
    """
    parent: Path = as_path(root if logger.save_dir is None else logger.save_dir) / logger.name
    if logger.version is None:
        return parent
    return parent / (f"version_{logger.version}" if isinstance(logger.version, int) else logger.version)


def make(logger: Any, root: Path) -> Path:
    """Create the folder, by default the next free ``version_N``: runs that start at the same time get different ones.

    Raises:
        OSError: it cannot be created.
    """
    folder = destination(logger, root)
    if logger.version is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    while True:
        taken = [path.name.removeprefix("version_") for path in folder.glob("version_*")] if folder.exists() else []
        number = max((int(each) for each in taken if each.isdigit()), default=-1) + 1
        with contextlib.suppress(FileExistsError):
            (folder / f"version_{number}").mkdir(parents=True)
            return folder / f"version_{number}"


def why_not_writable(folder: Path) -> str:
    """Return why a local folder could not be created and written; an empty string if it could."""
    try:
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    except OSError as error:
        return error.strerror or str(error)
    if not existing.is_dir():
        return f"{existing} is a file"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"no permission to write to {existing}"
