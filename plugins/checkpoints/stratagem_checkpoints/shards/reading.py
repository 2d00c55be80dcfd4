"""Load the state of a manifest: map its file into memory, or assemble a file from several ones first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.json_tree import decode
from stratagem.api.paths import refusals
from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem.errors import CheckpointError
from stratagem_checkpoints.mapped_file import mapped_tensors
from stratagem_checkpoints.raw_bytes import opened, write_at
from stratagem_checkpoints.shards.manifests import THREADS, fetch
from stratagem_checkpoints.shared_file import shared_file

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
    assert run.world is not None, "set before collectives exist"
    rank, size = run.world.local_rank, run.world.local_world_size
    with shared_file(path, manifest["bytes"], run) as file:
        on_all_ranks(run.collectives, lambda: _fill(file, path, manifest["pieces"][rank::size]))
        return on_all_ranks(run.collectives, lambda: mapped(file, manifest))


def _fill(target: Path, path: Path, pieces: list[dict[str, Any]]) -> None:
    with refusals(path, "read"), opened(target) as file, ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda piece: write_at(file, piece["offset"], memoryview(fetch(path, piece))), pieces):
            pass
