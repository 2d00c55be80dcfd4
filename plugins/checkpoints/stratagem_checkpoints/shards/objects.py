"""Write to an object store: one object for each rank, then the manifest, replaced atomically."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from stratagem.api import Collectives
from stratagem.api.paths import publish_object, refusals
from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem.errors import CheckpointError
from stratagem_checkpoints.raw_bytes import size_of
from stratagem_checkpoints.shards.manifests import MANIFEST, encoded, files_of, has_tag, read_manifest
from stratagem_checkpoints.shards.plan import Plan, pieces


def write(plan: Plan, path: Path, collectives: Collectives) -> None:
    """Write `plan` to the URL `path`, atomically. Collective.

    Raises:
        CheckpointError: the store refuses, or ranks reach different ones; on all ranks.
    """
    is_first = plan.rank == 0
    before = on_all_ranks(collectives, lambda: _earlier_files(path) if is_first else set[str]())
    save = collectives.broadcast_object(uuid.uuid4().hex[:12])
    mine = path / f"{save}-{plan.rank:05d}.bin"
    try:
        written = on_all_ranks(collectives, lambda: _write_parts(plan, mine))
        gathered = collectives.all_gather_object((mine.name, written))
        on_all_ranks(collectives, lambda: _finish(plan, path, gathered) if is_first else None)
    except Exception:
        _delete(path, {mine.name})
        raise
    _delete(path, before)


def remove(path: Path, files: set[str]) -> None:
    """Delete the manifest, so that it is no longer a checkpoint, and then `files`."""
    with refusals(path, "deleted"):
        (path / MANIFEST).unlink(missing_ok=True)
    _delete(path, files)
    with contextlib.suppress(Exception):  # most stores have no folders
        path.rmdir()


def _earlier_files(path: Path) -> set[str]:
    """Return the files of the checkpoint at `path`, to be deleted once the new one is written."""
    if has_tag(path):
        with contextlib.suppress(CheckpointError):  # a damaged one is overwritten, too
            return files_of(read_manifest(path))
        return set()
    with refusals(path):
        remote: Any = path  # a UPath
        remote.fs.invalidate_cache()
        if remote.fs.exists(remote.path) and (path.is_file() or any(path.iterdir())):
            raise CheckpointError(
                f"{path} exists and is not a checkpoint of this format", do="choose another path; nothing was changed"
            )
        with contextlib.suppress(NotImplementedError):
            path.mkdir(parents=True, exist_ok=True)
    return set()


def _write_parts(plan: Plan, target: Path) -> list[dict[str, Any]]:
    """Write this rank's pieces one after the other; return their offsets and checksums."""
    written: list[dict[str, Any]] = []

    def put(file: BinaryIO) -> None:
        at = 0
        for offset, content in pieces(plan):
            file.write(bytes(content))
            digest = xxhash.xxh3_128_hexdigest(content)
            written.append({"offset": offset, "bytes": len(content), "xxh3_128": digest, "file": target.name, "at": at})
            at += len(content)

    if plan.parts:
        with refusals(target):
            publish_object(target, put)
    return written


def _finish(plan: Plan, path: Path, gathered: list[tuple[str, list[dict[str, Any]]]]) -> None:
    """Publish the manifest, after checking that the objects of all ranks are visible here."""
    for name, written in gathered:
        size = sum(piece["bytes"] for piece in written)
        if size:
            with refusals(path / name):
                found = size_of(path / name)
            if found != size:
                raise CheckpointError(f"{path / name} has {found} bytes", expected=f"the {size} that were written")
    manifest = encoded(plan, [piece for _, written in gathered for piece in written])
    with refusals(path):
        publish_object(path / MANIFEST, lambda file: file.write(manifest))


def _delete(path: Path, files: set[str]) -> None:
    for name in files:
        try:
            (path / name).unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - each store has its own; nothing depends on it
            warnings.warn(f"{path / name} could not be deleted ({error})", stacklevel=2)
