"""A folder that appears whole or not at all: filled beside its target, then exchanged with it in one system call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from stratagem.errors import CheckpointError
from stratagem.places import Claim, claim

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


class StagedFolder:
    """What will be the folder `target`. Any rank writes into `path`; one rank begins, publishes and clears away.

    The claim on `path` tells a save that goes on from one that was killed.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.path = target, target.with_name(f".{target.name}.staged")
        self._claim: Claim | None = None

    def begin(self, is_ours: Callable[[Path], bool]) -> None:
        """Make the staged folder; clear away what killed saves left.

        Raises:
            CheckpointError: at the target is something that is not `is_ours`, or another run is writing it.
            OSError: the disk refuses.
        """
        target = self.target
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or (target.exists() and not is_ours(target)):
            raise CheckpointError(
                f"{target} exists and is no checkpoint of this format", do="choose another path; nothing was changed"
            )
        _clear_away_what_was_killed(target.parent, self.path)
        try:
            self.path.mkdir()
            self._claim = claim(self.path)
        except (FileExistsError, FileNotFoundError):  # another save was quicker
            self._claim = None
        if self._claim is None:
            raise CheckpointError(
                f"{target} is being written by another run", expected="one run for each folder",
                do="give each run its own default_root_dir or dirpath",
            )  # fmt: skip

    def publish(self) -> None:
        """Put the staged folder, whose files are fsynced, in the target's place.

        Raises:
            OSError: the disk refuses.
        """
        sync_folder(self.path)
        if self.target.exists():
            _exchange(self.path, self.target)
        else:
            os.rename(self.path, self.target)
        sync_folder(self.target.parent)

    def clear_away(self) -> None:
        """Delete what is staged and not published; only where `begin` succeeded."""
        if self._claim is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._claim.release()
            self._claim = None


def remove_folder(path: Path, files: set[str]) -> None:
    """Delete a published folder of `files`, and nothing else.

    Raises:
        CheckpointError: it holds other things.
    """
    strangers = {each.name for each in path.iterdir()} - files
    if strangers:
        raise CheckpointError(
            f"{path} holds {', '.join(sorted(strangers))}, which no checkpoint put there", do="nothing was deleted"
        )
    shutil.rmtree(_retire(path))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; not every system can open one."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def explained(error: Exception, path: Path) -> CheckpointError:
    """Return what went wrong while `path` was written as the error to raise."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(
        f"{path} could not be written ({getattr(error, 'strerror', None) or error})",
        expected="a writable folder with room, that all ranks share",
        do="an older checkpoint there, if any, is intact",
    )


def _retire(path: Path) -> Path:
    """Give the folder at `path` a name that nobody takes for a checkpoint, at once; return that name."""
    retired = path.with_name(f".{path.name}.{os.getpid()}.staged")
    os.rename(path, retired)
    return retired


def _clear_away_what_was_killed(parent: Path, wanted: Path) -> None:
    """Delete the staged folders that no living process claims; for the one that is `wanted`, it has to succeed."""
    for left in parent.glob(".*.staged"):
        with contextlib.suppress(*() if left == wanted else (OSError,)):
            if left.is_dir() and (claimed := claim(left)) is not None:
                with claimed:
                    shutil.rmtree(left)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders at once, so that there is a whole checkpoint at every moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (str(one).encode(), str(other).encode())
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    old = _retire(other)  # a system that cannot: for a moment only the old one, under this name
    os.rename(one, other)
    shutil.rmtree(old, ignore_errors=True)
