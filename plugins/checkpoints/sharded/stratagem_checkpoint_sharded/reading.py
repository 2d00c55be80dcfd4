"""Load the state of a manifest: map its file into memory, or assemble a file from several ones first."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.json_tree import decode
from stratagem.api.paths import refusals
from stratagem.checkpoint.mapped_file import mapped_tensors
from stratagem.errors import CheckpointError
from stratagem_checkpoint_sharded.manifest import THREADS, fetch

if TYPE_CHECKING:
    from stratagem.api import RunContext


def mapped(file: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the state, with tensors mapped from `file`: pages are read on first use; writes do not change the file."""
    entries = []
    for entry in manifest["tensors"]:
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{file} has a tensor of dtype {entry['dtype']!r}", expected="a dtype of torch")
        entries.append((entry["offset"], dtype, entry["shape"]))
    try:
        tensors = mapped_tensors(file, entries)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} has a tensor outside {file.name} ({error})", do="use another checkpoint"
        ) from error
    try:
        state: dict[str, Any] = decode(manifest["state"], tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.parent} has an invalid manifest ({error!r})") from error
    return state


def assembled(path: Path, manifest: dict[str, Any], run: RunContext) -> dict[str, Any]:
    """Return the state from pieces in several files, copied to their offsets in a temporary file, which is mapped.

    The processes of a node share that file, and each fetches a part of it. Collective.
    """
    world, collectives = run.world, run.collectives
    assert world is not None, "set before collectives exist"
    name, state, error = None, None, None
    try:
        if world.local_rank == 0:
            name = _temporary_file(manifest["bytes"])
    except OSError as caught:
        error = CheckpointError(
            f"{tempfile.gettempdir()} is too small for the {manifest['bytes']} bytes of {path} ({caught.strerror})",
            do="set TMPDIR to a folder with enough free space",
        )
    try:
        collectives.fail_together(error)
        names = {node: each for node, each in collectives.all_gather_object((world.node_rank, name)) if each}
        file = Path(names[world.node_rank])
        try:
            _fill(file, path, manifest, world.local_rank, world.local_world_size)
        except CheckpointError as caught:
            error = caught
        collectives.fail_together(error)
        try:
            state = mapped(file, manifest)
        except CheckpointError as caught:
            error = caught
        collectives.fail_together(error)
    finally:
        if name is not None:
            os.unlink(name)
    assert state is not None
    return state


def _temporary_file(size: int) -> str:
    descriptor, name = tempfile.mkstemp(prefix="stratagem-", suffix=".bin")
    try:
        os.truncate(descriptor, size)
        return name
    finally:
        os.close(descriptor)


def _fill(file: Path, path: Path, manifest: dict[str, Any], rank: int, world_size: int) -> None:
    descriptor = os.open(file, os.O_WRONLY)

    def copy(piece: dict[str, Any]) -> None:
        content, done = fetch(path, piece), 0
        while done < len(content):
            done += os.pwrite(descriptor, memoryview(content)[done:], piece["offset"] + done)

    try:
        with refusals(path, "read"), ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(copy, manifest["pieces"][rank::world_size]):
                pass
    finally:
        os.close(descriptor)
