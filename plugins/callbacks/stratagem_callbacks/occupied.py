"""Lock checkpoint folders: two runs in one folder would delete and overwrite each other's files."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path

from stratagem.api.paths import Claim, claim, is_remote
from stratagem.errors import ConfigError

_FILE = ".in_use"
#: Attempts to create the lock file, which another run may remove as it ends.
_ATTEMPTS = 100
_NOT_THROUGH_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: Folders that this process has locked, and how many callbacks use each.
_mine: dict[Path, tuple[Claim, int]] = {}


def occupy(folder: Path) -> None:
    """Lock `folder` for this process until `vacate`, or until the process ends.

    Raises:
        ConfigError: another run has locked it.
    """
    if is_remote(folder):
        return  # object stores have no locks
    key = Path(os.path.abspath(folder))
    file = folder / _FILE
    if file.is_symlink():
        raise ConfigError(f"{file} is a symbolic link", expected="a file, or nothing", do="remove it")
    if key in _mine:
        _mine[key] = (_mine[key][0], _mine[key][1] + 1)
        return
    with contextlib.suppress(OSError):  # if it cannot be written, the first save reports it
        folder.mkdir(parents=True, exist_ok=True)
        claimed = _claim_new(file)
        if claimed is None:
            raise ConfigError(
                f"{folder} is in use by another run ({_owner(folder)})",
                expected="a separate checkpoint folder for each run",
                do="set another default_root_dir, or ModelCheckpoint(dirpath=...)",
            )
        _mine[key] = (claimed, 1)
        with open(os.open(file, os.O_WRONLY | os.O_TRUNC | _NOT_THROUGH_LINKS), "w") as written:
            json.dump({"host": platform.node(), "pid": os.getpid()}, written)


def vacate(folder: Path) -> None:
    """Unlock `folder`; do nothing if this process has not locked it."""
    key = None if is_remote(folder) else Path(os.path.abspath(folder))
    if key is None or key not in _mine:
        return
    claimed, count = _mine.pop(key)
    if count > 1:
        _mine[key] = (claimed, count - 1)
        return
    with contextlib.suppress(OSError):
        (folder / _FILE).unlink()
    claimed.release()


def _claim_new(file: Path) -> Claim | None:
    """Create `file` if needed and lock it; return None if another process has locked it."""
    for _ in range(_ATTEMPTS):
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | _NOT_THROUGH_LINKS, 0o666))
        with contextlib.suppress(FileNotFoundError):  # another run removed it in between
            return claim(file, follow=False)
    return None


def _owner(folder: Path) -> str:
    try:
        content = json.loads((folder / _FILE).read_text())
        return f"process {content['pid']} on {content['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which has just started"
