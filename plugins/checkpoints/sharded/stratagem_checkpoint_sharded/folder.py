"""Writing into a folder that all ranks share: staged beside its target, then exchanged with it in one system call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stratagem.errors import CheckpointError
from stratagem.places import Claim, claim
from stratagem.world import Collectives
from stratagem_checkpoint_sharded.layout import Plan, pieces
from stratagem_checkpoint_sharded.manifest import MANIFEST, TENSORS, THREADS, checksum, encoded, has_tag

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


def write(plan: Plan, path: Path, collectives: Collectives) -> None:
    """Write `plan` to the folder `path`, whole or not at all. Collective.

    Raises:
        CheckpointError: the folder, the disk or another run refuses; on all ranks.
    """
    staged, claimed, error = path.with_name(f".{path.name}.staged"), None, None
    try:
        try:
            if plan.rank == 0:
                claimed = _begin(path, staged, plan.size)
        except (CheckpointError, OSError) as caught:
            error = _explained(caught, path)
        collectives.fail_together(error)
        written: list[dict[str, Any]] = []
        try:
            written = _write_parts(plan, staged / TENSORS)
        except OSError as caught:
            error = _explained(caught, path)
        collectives.fail_together(error)
        everybody = collectives.all_gather_object(written)
        if plan.rank == 0:
            try:
                _finish(path, staged, encoded(plan, [piece for each in everybody for piece in each]))
            except (CheckpointError, OSError) as caught:
                error = _explained(caught, path)
        collectives.fail_together(error)
    finally:
        if claimed is not None:  # ours, so it may go
            shutil.rmtree(staged, ignore_errors=True)
            claimed.release()


def retire(path: Path) -> Path:
    """Give the checkpoint at `path` a name that nobody takes for one, at once; return that name."""
    retired = path.with_name(f".{path.name}.{os.getpid()}.staged")
    os.rename(path, retired)
    return retired


def _begin(path: Path, staged: Path, size: int) -> Claim:
    """Make the staged folder with a file of `size` zeros; the claim on it tells a live save from a dead one's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if (path.exists() or path.is_symlink()) and (path.is_symlink() or not has_tag(path)):
        raise CheckpointError(
            f"{path} exists and is no sharded checkpoint", do="choose another path; nothing was changed"
        )
    _clear_away_what_was_killed(path.parent, staged)
    try:
        staged.mkdir()
        claimed = claim(staged)
    except (FileExistsError, FileNotFoundError):  # another save was quicker
        claimed = None
    if claimed is None:
        raise CheckpointError(
            f"{path} is being written by another run", expected="one run for each folder",
            do="give each run its own default_root_dir or dirpath",
        )  # fmt: skip
    try:
        with (staged / TENSORS).open("wb") as file:
            file.truncate(size)
    except OSError:
        shutil.rmtree(staged, ignore_errors=True)
        claimed.release()
        raise
    return claimed


def _clear_away_what_was_killed(parent: Path, wanted: Path) -> None:
    """Delete the staged folders that no living process claims; for the one that is `wanted`, it has to succeed."""
    for left in parent.glob(".*.staged"):
        with contextlib.suppress(*() if left == wanted else (OSError,)):
            if left.is_dir() and (claimed := claim(left)) is not None:
                with claimed:
                    shutil.rmtree(left)


def _write_parts(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """Write this rank's pieces; return where they are and their checksums."""
    written: list[dict[str, Any]] = []
    descriptor = os.open(path, os.O_WRONLY)

    def put(offset: int, content: memoryview) -> dict[str, Any]:
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], offset + done)
        return {"offset": offset, "bytes": len(content), "xxh3_128": checksum(content)}

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            under_way: deque[Future[dict[str, Any]]] = deque()
            for offset, content in pieces(plan.parts):
                if len(under_way) >= 2 * THREADS:  # pieces of device memory are copied when their turn comes
                    written.append(under_way.popleft().result())
                under_way.append(pool.submit(put, offset, content))
            written += [future.result() for future in under_way]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _finish(path: Path, staged: Path, manifest: bytes) -> None:
    with (staged / MANIFEST).open("wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(staged)
    if path.exists():
        _exchange(staged, path)
    else:
        os.rename(staged, path)
    _sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders at once, so that there is a whole checkpoint at every moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (str(one).encode(), str(other).encode())
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    old = retire(other)  # a system that cannot: for a moment only the old one, under this name
    os.rename(one, other)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: Exception, path: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(
        f"{path} could not be written ({getattr(error, 'strerror', None) or error})",
        expected="a writable folder with room, that all ranks share",
        do="an older checkpoint there, if any, is intact",
    )


__all__ = ["TENSORS", "retire", "write"]
