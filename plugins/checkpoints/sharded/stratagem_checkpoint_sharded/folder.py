"""Write into a folder on a file system that all ranks share."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stratagem.api import Collectives
from stratagem.checkpoint.atomic import StagedFolder, explained
from stratagem.errors import CheckpointError
from stratagem_checkpoint_sharded.layout import Plan, pieces
from stratagem_checkpoint_sharded.manifest import MANIFEST, TENSORS, THREADS, checksum, encoded, files_at, has_tag


def write(plan: Plan, path: Path, collectives: Collectives) -> None:
    """Write `plan` to the folder `path`, atomically. Collective.

    Raises:
        CheckpointError: the folder cannot be written, or another run uses it; on all ranks.
    """
    staged, error = StagedFolder(path), None
    try:
        try:
            if plan.rank == 0:
                staged.begin(has_tag, files_at)
                with (staged.path / TENSORS).open("wb") as file:
                    file.truncate(plan.size)
        except (CheckpointError, OSError) as caught:
            error = explained(caught, path)
        collectives.fail_together(error)
        written: list[dict[str, Any]] = []
        try:
            written = _write_parts(plan, staged.path / TENSORS)
        except OSError as caught:
            error = explained(caught, path)
        collectives.fail_together(error)
        gathered = collectives.all_gather_object(written)
        if plan.rank == 0:
            try:
                _write_manifest(staged.path, encoded(plan, [piece for each in gathered for piece in each]))
                staged.publish()
            except (CheckpointError, OSError) as caught:
                error = explained(caught, path)
        collectives.fail_together(error)
    finally:
        staged.clear_away()


def _write_parts(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """Write this rank's pieces; return their offsets and checksums."""
    written: list[dict[str, Any]] = []
    descriptor = os.open(path, os.O_WRONLY)

    def put(offset: int, content: memoryview) -> dict[str, Any]:
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], offset + done)
        return {"offset": offset, "bytes": len(content), "xxh3_128": checksum(content)}

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            pending: deque[Future[dict[str, Any]]] = deque()
            for offset, content in pieces(plan):
                if len(pending) >= 2 * THREADS:  # pieces on the device are copied to the CPU one after the other
                    written.append(pending.popleft().result())
                pending.append(pool.submit(put, offset, content))
            written += [future.result() for future in pending]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _write_manifest(folder: Path, manifest: bytes) -> None:
    with (folder / MANIFEST).open("wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
