"""Write files atomically: to a temporary name, hashed, fsynced, renamed. Independent of their content.

[Note: the sidecar]
``last.ckpt.sum`` beside ``last.ckpt`` has a line for each content that the file may have: algorithm, digest, size.
Publishing writes the new content under a temporary name, then a sidecar with the new line *and* the old ones,
then renames the content into place, then drops the old lines. After a crash at any time the
digest of the file is in its sidecar.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from stratagem.api.paths import Claim, claim, create_beside, is_remote, publish_object, refusals, replace_text
from stratagem.checkpoint.atomic import explained, sync_folder
from stratagem.checkpoint.state_checks import check_structure
from stratagem.errors import CheckpointError

#: Layout of the state that checkpoint formats store.
STATE_VERSION: Final = 2

STAGED = ".staged"

_CHUNK = 1 << 20


class Hasher(Protocol):
    """A hash object of `hashlib`, or a compatible one."""

    @property
    def name(self) -> str: ...
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def publish_file(path: Path, write: Callable[[BinaryIO], object], hasher: Callable[[], Hasher]) -> None:
    """Write `path` atomically, with the content that `write` writes; see [Note: the sidecar].

    Raises:
        CheckpointError: the file system raised an error; the old file at `path` is unchanged and still verifies.
    """
    if is_remote(path):
        _publish_remotely(path, write, hasher)
        return
    staged = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        _delete_leftovers(path)
        with create_beside(path) as file, _claimed(staged := Path(file.name)):
            hashing = _HashingFile(file, hasher())
            hashing.fill(write)
            file.flush()
            os.fsync(file.fileno())
            with _claimed(path.parent):  # two runs that write here must not mix content and sidecar
                _write(sidecar(path), [hashing.line(), *_lines(sidecar(path))])
                os.replace(staged, path)
                sync_folder(path.parent)
                _write(sidecar(path), [hashing.line()])
    except OSError as error:
        raise explained(error, path, expected="a writable folder with free space") from error
    finally:
        with contextlib.suppress(OSError):  # the same error may prevent its removal
            if staged is not None:
                staged.unlink(missing_ok=True)


def _publish_remotely(path: Any, write: Callable[[BinaryIO], object], hasher: Callable[[], Hasher]) -> None:
    """As `publish_file`: the object exists only after a complete upload."""
    with refusals(path):
        hashing = _HashingFile(None, hasher())

        def pass_through(file: BinaryIO) -> None:
            hashing.file = file
            hashing.fill(write)

        def announce() -> None:
            _write(sidecar(path), [hashing.line(), *_lines(sidecar(path))])

        publish_object(path, pass_through, before=announce)
        _write(sidecar(path), [hashing.line()])


def verify_file(path: Path, hasher: Callable[[], Hasher]) -> bool:
    """Check `path` against its sidecar; return False if it has none (another program wrote it).

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    with refusals(path, "read"):
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist", expected="a checkpoint file", do="check the path")
        lines = _lines(sidecar(path))
    if not lines and not sidecar(path).exists():
        return False
    if not lines:
        raise CheckpointError(
            f"{sidecar(path)} has no checksum", expected="the file that was saved with the checkpoint",
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


def remove_file(path: Path) -> None:
    """Delete a published file and its sidecar."""
    path.unlink(missing_ok=True)
    sidecar(path).unlink(missing_ok=True)


def sidecar(path: Path) -> Path:
    """Return the path of the checksum of `path`."""
    return path.with_name(path.name + ".sum")


def check_version(state: Mapping[str, Any], path: Path) -> None:
    """Refuse a state that is not a checkpoint, or that only a newer stratagem can read."""
    check_structure(state, path)
    tag = state.get("format", {})
    version, writer = tag.get("version", 1), tag.get("stratagem", "of an unknown version")
    if isinstance(version, bool) or not isinstance(version, int) or version > STATE_VERSION:
        raise CheckpointError(
            f"{path} has version {version!r} and was written by stratagem {writer}",
            expected=f"at most version {STATE_VERSION}", do="read it with a newer stratagem",
        )  # fmt: skip


class _HashingFile:
    """Passes writes to a sequentially written file, and hashes and counts the bytes."""

    def __init__(self, file: Any, hasher: Hasher) -> None:
        self.file, self.hasher, self.size = file, hasher, 0
        self.refusal: Exception | None = None

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        self.size += len(memoryview(data).cast("B"))
        try:
            return int(self.file.write(data))
        except Exception as error:
            self.refusal = error
            raise

    def fill(self, write: Callable[[BinaryIO], object]) -> None:
        """Call `write` with this file; raise the file's own error, which torch.save would replace."""
        try:
            write(self)  # type: ignore[arg-type]
        except Exception as error:
            if self.refusal is None or error is self.refusal:
                raise
            raise self.refusal from error

    def line(self) -> str:
        """Return the line of the sidecar for the written bytes."""
        return f"{self.hasher.name} {self.hasher.hexdigest()} {self.size}"

    def flush(self) -> None:
        self.file.flush()

    def tell(self) -> int:
        return self.size


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return []
    return [line for line in lines if len(line.split()) == 3 and line.split()[2].isdigit()]


def _write(path: Path, lines: list[str]) -> None:
    """Write a sidecar with these lines."""
    text = "".join(f"{line}\n" for line in lines)
    if is_remote(path):
        path.write_bytes(text.encode("ascii"))
    else:
        replace_text(path, text, durable=True)
        sync_folder(path.parent)


def _claimed(path: Path) -> Claim:
    claimed = claim(path, wait=True)
    assert claimed is not None, "only a claim that does not wait can fail"
    return claimed


def _delete_leftovers(path: Path) -> None:
    """Delete the temporary files of `path` that no process writes any more."""
    begin, names = f"{path.name}.", []
    with contextlib.suppress(PermissionError):  # one may write to a folder without listing it
        names = [name for name in os.listdir(path.parent) if name.startswith(begin) and name.endswith(STAGED)]
    for left in map(path.with_name, names):
        with contextlib.suppress(OSError):
            if (claimed := claim(left, follow=False)) is not None:
                left.unlink(missing_ok=True)
                claimed.release()


def _digest(path: Path, hasher: Hasher) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _difference(size: int, lines: list[str]) -> str:
    sizes = {int(line.split()[2]) for line in lines}
    return "its checksum differs" if size in sizes else f"it has {size} bytes instead of {max(sizes)}"
