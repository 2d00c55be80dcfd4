"""Write a folder atomically: fill a temporary folder beside the target, then exchange the two in one system call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from stratagem.api.paths import Claim, claim
from stratagem.errors import CheckpointError

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


class StagedFolder:
    """The temporary folder of `target`. Any rank writes into `path`; one rank begins, publishes and clears away.

    The claim on `path` distinguishes a running save from one that was killed.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.path = target, target.with_name(f".{target.name}.staged")
        self._claim: Claim | None = None
        #: The files of the old checkpoint at the target; all others there belong to the user.
        self._replaced: set[str] = set()

    def begin(self, is_ours: Callable[[Path], bool], files_of: Callable[[Path], set[str]]) -> None:
        """Create the temporary folder; delete those of killed saves.

        Args:
            is_ours: whether a folder is a checkpoint of the format that saves.
            files_of: returns the files that the format wrote into such a folder, as relative paths.

        Raises:
            CheckpointError: the target exists and not `is_ours`, or another run is writing it.
            OSError: the file system raises it.
        """
        target = self.target
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or (target.exists() and not is_ours(target)):
            raise CheckpointError(
                f"{target} exists and is not a checkpoint of this format", do="choose another path; nothing was changed"
            )
        self._replaced = files_of(target) if target.exists() else set()
        _delete_leftovers(target.parent, self.path)
        try:
            self.path.mkdir()
            self._claim = claim(self.path)
        except (FileExistsError, FileNotFoundError):  # another save created it first
            self._claim = None
        if self._claim is None:
            raise CheckpointError(
                f"{target} is being written by another run", expected="one run for each folder",
                do="give each run its own default_root_dir or dirpath",
            )  # fmt: skip

    def publish(self) -> None:
        """Replace the target by the temporary folder, whose files are fsynced; keep the user's files in the target.

        Raises:
            OSError: the file system raises it.
        """
        replaces = self.target.exists()
        if replaces:
            _keep(self.target, self.path, self._replaced)
        sync_folder(self.path)
        if replaces:
            _exchange(self.path, self.target)
            if self.path.is_dir():
                _keep(self.path, self.target, self._replaced)  # files that were added in the meantime
        else:
            os.rename(self.path, self.target)
        sync_folder(self.target.parent)

    def clear_away(self) -> None:
        """Delete the temporary folder if it was not published; does nothing unless `begin` succeeded."""
        if self._claim is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._claim.release()
            self._claim = None


def remove_folder(path: Path, files: set[str]) -> None:
    """Delete a published folder of `files` (relative paths).

    Raises:
        CheckpointError: it contains other files.
    """
    if strangers := _others(path, files):
        raise CheckpointError(
            f"{path} contains {', '.join(sorted(strangers))}, which the checkpoint did not write",
            do="nothing was deleted",
        )
    shutil.rmtree(_retire(path))


def sync_folder(path: Path) -> None:
    """Fsync the entries of a folder; not every system can open a folder."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_SHARED = "a writable folder with free space, which all ranks share"


def explained(error: BaseException, path: Path, expected: str = _SHARED) -> CheckpointError:
    """Return the error to raise for `error`, which was raised while `path` was written."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(
        f"{path} could not be written ({getattr(error, 'strerror', None) or error})",
        expected=expected,
        do="an older checkpoint there, if any, is intact",
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into the one to raise, where `path` is written."""
    try:
        yield
    except OSError as error:
        raise explained(error, path) from error


def _others(folder: Path, files: set[str]) -> list[str]:
    """Return all files and links in `folder`, at any depth, except `files`; as relative paths."""
    found = []
    for inner, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(inner, name))]
        found += [os.path.relpath(os.path.join(inner, name), folder) for name in [*names, *links]]
    return [name for name in found if Path(name).as_posix() not in files]


def _keep(source: Path, target: Path, files: set[str]) -> None:
    """Link the entries of `source` except `files` into `target`, under the same names."""
    for name in _others(source, files):
        new = target / name
        if new.exists() or new.is_symlink():
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, new, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(source / name, new, follow_symlinks=False)


def _retire(path: Path) -> Path:
    """Rename the folder at `path` to a name that no format recognises; return that name."""
    retired = path.with_name(f".{path.name}.{os.getpid()}.staged")
    os.rename(path, retired)
    return retired


def _delete_leftovers(parent: Path, wanted: Path) -> None:
    """Delete the temporary folders that no running process claims; raise if that fails for `wanted`."""
    for left in parent.glob(".*.staged"):
        with contextlib.suppress(*() if left == wanted else (OSError,)):
            if left.is_dir() and (claimed := claim(left)) is not None:
                with claimed:
                    shutil.rmtree(left)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders atomically, so that there is a complete checkpoint at any time."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (str(one).encode(), str(other).encode())
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    old = _retire(other)  # without renameat2: for a moment there is only the old one, under this name
    os.rename(one, other)
    shutil.rmtree(old, ignore_errors=True)
