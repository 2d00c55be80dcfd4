"""Save one folder from all ranks, each its part of the state; any number of ranks can read it.

[Note: one file for all]
``tensors.bin`` has each tensor as one contiguous row-major block. Each rank writes its rows at their offsets, so the
file does not depend on the number of ranks. A reader maps the file into memory (mmap): only the pages that it touches
are read, so a strategy with sharded parameters reads only its shards. ``manifest.json`` is written last. It has the
position of each tensor, the checksum of each piece, and all values that are not tensors. No code of either file is
executed.

[Note: objects]
In an object store several processes cannot write to one file. There each rank writes one object, and the manifest has
the object of each piece. Each save uses new object names, so that replacing the manifest switches atomically from one
complete set to the next. A reader copies the pieces to their offsets in a temporary local file, and maps that; the
processes of a node share the file, and each fetches a part.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash
from attrs import define

from stratagem.api import Collectives, hookimpl
from stratagem.api.paths import is_remote
from stratagem.checkpoint.state_checks import on_all_ranks, on_first_rank
from stratagem.errors import CheckpointError
from stratagem_checkpoints.engine import FolderLayout
from stratagem_checkpoints.raw_bytes import opened, write_at
from stratagem_checkpoints.shards import manifests, objects
from stratagem_checkpoints.shards.manifests import MANIFEST, TENSORS, THREADS
from stratagem_checkpoints.shards.plan import Plan, pieces
from stratagem_checkpoints.shards.reading import assembled, mapped

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class ShardedCheckpoint(FolderLayout):
    """Write one folder from all ranks, each rank its part; any number of ranks reads it.

    See [Note: one file for all] and [Note: objects].
    """

    suffix: ClassVar[str] = ".ckpt"
    index = manifest = MANIFEST

    def planned(self, state: dict[str, Any], path: Path, run: RunContext) -> Plan:
        if getattr(path, "protocol", "") == "memory" and run.world_size > 1:  # only this process sees it
            raise CheckpointError(
                f"{path} is in the memory of each process and the run has {run.world_size} of them",
                expected="storage that all ranks share",
            )
        return Plan(state, run.rank, run.world_size)

    def write(self, plan: Plan, path: Path, collectives: Collectives) -> None:
        if is_remote(path):
            objects.write(plan, path, collectives)
        else:
            super().write(plan, path, collectives)

    def prepare(self, plan: Plan, folder: Path) -> None:
        with (folder / TENSORS).open("wb") as file:
            file.truncate(plan.size)

    def write_part(self, plan: Plan, folder: Path, collectives: Collectives) -> list[dict[str, Any]]:
        return _write_parts(plan, folder / TENSORS)

    def described(self, plan: Plan, parts: list[list[dict[str, Any]]], folder: Path) -> bytes:
        return manifests.encoded(plan, [piece for each in parts for piece in each])

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        manifest = on_first_rank(run.collectives, lambda: manifests.read_manifest(path))
        if is_remote(path) or manifests.files_of(manifest) - {TENSORS}:
            return assembled(path, manifest, run)

        def read() -> dict[str, Any]:
            manifests.verify(path, manifest, run.rank, run.collectives.world_size)  # each byte is read by one rank
            return mapped(path / TENSORS, manifest)

        return on_all_ranks(run.collectives, read)

    def recognises(self, path: Path) -> bool:
        return manifests.has_tag(path)

    def verify(self, path: Path) -> bool:
        manifests.verify(path, manifests.read_manifest(path))
        return True

    def files_at(self, path: Path) -> set[str]:
        return manifests.files_at(path)

    def remove(self, path: Path) -> None:
        if not self.recognises(path):
            raise CheckpointError(f"{path} is not a sharded checkpoint", do="check the path; nothing was deleted")
        if is_remote(path):
            objects.remove(path, manifests.files_at(path))
        else:
            super().remove(path)


def _write_parts(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """Write this rank's pieces; return their offsets and checksums."""
    written: list[dict[str, Any]] = []
    with opened(path) as file, ThreadPoolExecutor(THREADS) as pool:

        def put(offset: int, content: memoryview) -> dict[str, Any]:
            write_at(file, offset, content)
            return {"offset": offset, "bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}

        pending: deque[Future[dict[str, Any]]] = deque()
        for offset, content in pieces(plan):
            if len(pending) >= 2 * THREADS:  # pieces on the device are copied to the CPU one after the other
                written.append(pending.popleft().result())
            pending.append(pool.submit(put, offset, content))
        written += [future.result() for future in pending]
        os.fsync(file.fileno())
    return written
