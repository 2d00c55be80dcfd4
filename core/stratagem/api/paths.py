"""Where files are: a `pathlib.Path`, or a URL such as ``s3://bucket/run`` as a path with the same methods.

URLs go through fsspec (`universal_pathlib` gives them the methods of a path), which is imported when one is met.
Credentials and endpoints are fsspec's own business: environment variables, its configuration files, or a `UPath` made
with storage options.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stratagem.errors import CheckpointError, ConfigError


def as_path(path: Any) -> Path:
    """Return `path` as a path: local ones as a `Path`, URLs as a `UPath`; a leading ``~`` is the home folder.

    Raises:
        ConfigError: no path at all (empty, with NUL), no home folder for ``~user``, or a URL whose reader is not
            installed.
    """
    if "\0" in str(path):
        raise ConfigError(f"path {str(path)!r} has a NUL character in it", expected="a path", do="remove it")
    if hasattr(path, "fs") and hasattr(path, "protocol"):  # a UPath
        return path if path.protocol not in ("", "file", "local") else _local(path.path)
    if not isinstance(path, str) or "://" not in path:
        return _local(os.fspath(path))
    if path.startswith(("file://", "local://")):
        return _local(path.partition("://")[2])
    try:
        from upath import UPath

        remote: Any = UPath(path)
        _ = remote.fs
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{path!r} is a URL that cannot be opened ({error})", expected="a path, or a URL that fsspec understands",
            do='install "stratagem-core[remote]" and the fsspec package for it (s3fs, gcsfs, adlfs ...)',
        ) from error  # fmt: skip
    return remote  # type: ignore[no-any-return]


def _local(text: str) -> Path:
    if not text:
        do = 'write "." for the current folder'
        raise ConfigError("path '' is empty", expected="the path of a file or folder", do=do)
    if not text.startswith("~"):
        return Path(text)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        first = Path(text).parts[0]
        raise ConfigError(
            f"path {text!r} begins with {first!r} and no user of that name has a home folder here",
            expected="~ for your own home folder, or ~user", do=f"write {'./' + text!r} for a folder of that name",
        )  # fmt: skip
    return Path(expanded)


def is_remote(path: Any) -> bool:
    """Whether `path` (of `place`) is in no file system of this machine."""
    return not isinstance(path, Path)


# --- Folders and files that one process may claim ----------------------------------------------------------------


class Claim:
    """Says that a file or folder of this machine is this process's, until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock; idempotent."""
        from filelock import unlock_descriptor

        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # closing alone would leave it to a child that inherited it
                unlock_descriptor(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(path: Path, wait: bool = False, follow: bool = True) -> Claim | None:
    """Claim an existing file or folder; None if another claim on it stands (`wait`: until it does not).

    File systems without locks grant every claim.

    Raises:
        OSError: there is nothing, or a symbolic link where `follow` is False.
    """
    from filelock import lock_descriptor

    descriptor, locked = _open(path, follow), True
    try:
        with contextlib.suppress(OSError):  # no locks here
            locked = lock_descriptor(descriptor, blocking=wait)
        if locked and not _is_at(path, descriptor, follow):
            raise FileNotFoundError(errno.ENOENT, "removed before it could be claimed", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    if locked:
        return Claim(descriptor)
    os.close(descriptor)
    return None


def _open(path: Path, follow: bool) -> int:
    # Without O_NONBLOCK a named pipe that somebody left there would be waited for.
    flags = os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        return os.open(path, flags | os.O_RDWR)  # NFS locks only what is open for writing
    except OSError:  # a folder, or another user's file
        return os.open(path, flags | os.O_RDONLY)


def _is_at(path: Path, descriptor: int, follow: bool) -> bool:
    """Whether what was opened is still at `path`: it may have been removed, and made again, before it was locked."""
    found = os.fstat(descriptor)
    return found.st_nlink > 0 or os.path.samestat(found, os.stat(path, follow_symlinks=follow))


# --- Files that replace others at once --------------------------------------------------------------------------


def create_beside(path: Path) -> BinaryIO:
    """Create and open a new file to fill and rename to `path`: its name is that of `path`, a random part, ``.staged``.

    Neither a file nor a symbolic link that somebody left there is ever opened.

    Raises:
        OSError: the folder or the disk refuses.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            return path.with_name(f"{path.name}.{os.urandom(6).hex()}.staged").open("xb")


@contextlib.contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """Within: fill a new file, which then replaces `path`; if that fails, nothing changes.

    Args:
        path: the file that appears, or changes, at once.
        durable: fsync the content.

    Raises:
        OSError: the folder or the disk refuses.
    """
    file = create_beside(path)
    try:
        with file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(file.name, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(file.name)


def replace_text(path: Path, text: str, durable: bool = False) -> None:
    """Write `text` to `path` as `replacing` does."""
    with replacing(path, durable) as file:
        file.write(text.encode("utf-8"))


# --- Objects: written whole or not at all ------------------------------------------------------------------------


@contextlib.contextmanager
def refusals(path: Any, doing: str = "written") -> Iterator[None]:
    """Turn whatever an object store raises into a `CheckpointError`; each has exceptions of its own."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        intact, other = "an older checkpoint there, if any, is intact", "check the address and the credentials"
        raise CheckpointError(
            f"{path} could not be {doing} ({type(error).__name__}: {text[0] if text else 'no reason given'})",
            expected="a store that can be reached, with the right to do it",
            do=intact if doing == "written" else other,
        ) from error  # fmt: skip


def publish_object(path: Any, write: Callable[[BinaryIO], object], before: Callable[[], None] | None = None) -> None:
    """Let `write` fill an object that appears at `path` at once; nothing appears, or changes, if it raises.

    `before` is called when all is written and nothing can be seen yet.
    """
    filesystem = _own_filesystem(path)
    # Closing a file that failed half-way would publish the half: only a transaction discards it.
    with filesystem.transaction:
        with filesystem.open(path.path, "wb") as file:
            write(file)
        if before is not None:
            before()


def modified_at(path: Any) -> float:
    """Return when `path` was written, in seconds since 1970; 0 if its store does not tell."""
    if not is_remote(path):
        return float(path.stat().st_mtime_ns) / 1e9
    with contextlib.suppress(Exception):
        return float(path.fs.modified(path.path).timestamp())
    return 0.0


def _own_filesystem(path: Any) -> Any:
    """Return a file system object of our own: a transaction of the shared one would hold up others' files."""
    return type(path.fs)(*path.fs.storage_args, **path.fs.storage_options, skip_instance_cache=True)
