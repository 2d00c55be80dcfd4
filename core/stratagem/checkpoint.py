"""Files that are whole or not there: staged, hashed, fsynced, renamed. Knows nothing of what is in them.

[Note: the sidecar]
Beside ``last.ckpt`` lies ``last.ckpt.sum`` with a line for each content that the file may have: algorithm, digest,
size. Publishing writes the new content under a temporary name, then a sidecar with the new line *and* the old ones,
then renames the content into place, then drops the old lines. A crash at any moment leaves a file whose
digest is in its sidecar.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from stratagem.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from stratagem.plugin import CheckpointFormat

_STAGED = ".staged"
_CHUNK = 1 << 20


class Hasher(Protocol):
    """What `hashlib` and its relatives return."""

    name: str

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def publish_file(path: Path, write: Callable[[BinaryIO], None], hasher: Callable[[], Hasher]) -> None:
    """Let `write` fill a file that appears at `path` whole or not at all; see [Note: the sidecar].

    Raises:
        CheckpointError: the folder or the disk refuses; what was at `path` is untouched and still verifies.
    """
    staged = path.with_name(f"{path.name}.{os.getpid()}{_STAGED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with staged.open("wb") as file:
            hashing = _HashingFile(file, hasher())
            write(hashing)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        line = f"{hashing.hasher.name} {hashing.hasher.hexdigest()} {staged.stat().st_size}"
        _write_durably(sidecar(path), [line, *_lines(sidecar(path))])
        os.replace(staged, path)
        _sync_folder(path.parent)
        _write_durably(sidecar(path), [line])
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror or error})",
            expected="a writable folder with room",
            do="an older checkpoint there, if any, is intact",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # what kept it from being written keeps it from being removed
            staged.unlink(missing_ok=True)


def verify_file(path: Path, hasher: Callable[[], Hasher]) -> bool:
    """Check `path` against its sidecar; False if it has none (another program wrote it).

    Raises:
        CheckpointError: the file is missing, cut short, or not what was written.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", expected="a checkpoint file", do="check the path")
    lines = _lines(sidecar(path))
    if not lines and not sidecar(path).exists():
        return False
    if not lines:
        raise CheckpointError(
            f"{sidecar(path)} holds no checksum", expected="what was written beside the checkpoint",
            do="use an older checkpoint, or delete that file to read this one unverified",
        )  # fmt: skip
    size, digest = path.stat().st_size, None
    for line in lines:
        _, wanted, length = line.split()
        if size == int(length):
            digest = digest or _digest(path, hasher())
            if digest == wanted:
                return True
    raise CheckpointError(
        f"{path} is not what was written: {_difference(size, lines)}",
        expected="the content that its sidecar describes",
        do="use an older checkpoint",
    )


def newest_whole(folder: Path, checkpoint_format: CheckpointFormat) -> Path | None:
    """Return the newest checkpoint in `folder` that verifies; None if there is none."""
    if not folder.is_dir():
        return None
    for path in sorted(_candidates(folder, checkpoint_format), key=_age):
        if checkpoint_format.is_whole(path):
            return path
    return None


def remove_file(path: Path) -> None:
    """Delete a published file and its sidecar."""
    path.unlink(missing_ok=True)
    sidecar(path).unlink(missing_ok=True)


def sidecar(path: Path) -> Path:
    """Return where the checksum of `path` stands."""
    return path.with_name(path.name + ".sum")


def read_any(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint in this process alone, in whichever installed format recognises it.

    Raises:
        CheckpointError: no such file, none of the formats, or damaged.
    """
    from types import SimpleNamespace

    from stratagem.world import Collectives, World

    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", expected="a checkpoint", do="check the path")
    alone = SimpleNamespace(collectives=Collectives(), world=World(), rank=0, world_size=1, is_global_zero=True)
    checkpoint_format = format_of(path)
    if checkpoint_format is None:
        raise CheckpointError(f"{path} is in no format that is installed", do="see `stratagem plugins list`")
    state: dict[str, Any] = checkpoint_format.load_checkpoint(path, None, alone)
    return state


def format_of(path: Path) -> Any:
    """Return the first installed checkpoint format that recognises `path`; None if none does."""
    from stratagem import registry
    from stratagem.resolver import make

    for entry in registry.entries("checkpoint"):
        with contextlib.suppress(PluginError):  # one broken package must not hide the others
            checkpoint_format = make(entry, {})
            if checkpoint_format.recognises(path):
                return checkpoint_format
    return None


class _HashingFile:
    """Hashes what passes through to a file that is written from front to back."""

    def __init__(self, file: BinaryIO, hasher: Hasher) -> None:
        self.file, self.hasher = file, hasher

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def tell(self) -> int:
        return self.file.tell()


def _candidates(folder: Path, checkpoint_format: CheckpointFormat) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.name.endswith((_STAGED, ".sum")) and checkpoint_format.recognises(path):
            yield path


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):  # another process may be tidying up
        return -path.stat().st_mtime_ns
    return 0


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return []
    return [line for line in lines if len(line.split()) == 3 and line.split()[2].isdigit()]


def _write_durably(path: Path, lines: list[str]) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}{_STAGED}")
    try:
        with staged.open("w", encoding="ascii") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
        _sync_folder(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every system can open a folder."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _digest(path: Path, hasher: Hasher) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _difference(size: int, lines: list[str]) -> str:
    sizes = {int(line.split()[2]) for line in lines}
    return "its checksum differs" if size in sizes else f"it has {size} bytes instead of {max(sizes)}"
