"""Write, read and verify ``manifest.json``: positions and checksums. Its content is checked as untrusted input."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from stratagem.api.paths import is_remote, refusals
from stratagem.errors import CheckpointError
from stratagem_checkpoints.engine import damaged, unreadable
from stratagem_checkpoints.raw_bytes import checksum, chunks, read_range, sealed, size_of, unsealed
from stratagem_checkpoints.shards.plan import ALIGNMENT, Plan

MANIFEST, TENSORS = "manifest.json", "tensors.bin"
TAG, VERSION = "stratagem sharded checkpoint", 1
#: Threads that read and write files: some compute checksums and copy while others wait for the disk.
THREADS = min(4, os.cpu_count() or 1)


def encoded(plan: Plan, written: list[dict[str, Any]]) -> bytes:
    """Return the manifest of a save, with its own checksum."""
    content = {
        "format": TAG, "version": VERSION, "bytes": plan.size, "tensors": plan.tensors,
        "pieces": sorted(written, key=lambda piece: piece["offset"]), "state": plan.tree,
    }  # fmt: skip
    for begin, end in _gaps(content):
        if end - begin >= ALIGNMENT:
            raise CheckpointError(f"bytes {begin} to {end} were written by no rank", do="tell the strategy's author")
    for piece, following in itertools.pairwise(content["pieces"]):
        if piece["offset"] + piece["bytes"] > following["offset"]:
            raise CheckpointError(
                f"bytes from {following['offset']} were written by two ranks", do="tell the strategy's author"
            )
    return sealed(content)


def has_tag(path: Path) -> bool:
    """Return whether `path` has a manifest of this format."""
    if is_remote(path):
        with refusals(path, "read"):
            try:
                manifest: Any = path / MANIFEST  # a UPath
                return TAG.encode() in manifest.fs.cat_file(manifest.path, start=0, end=200)
            except FileNotFoundError:
                return False
    try:
        with (path / MANIFEST).open("rb") as file:
            return TAG.encode() in file.read(200)
    except OSError:
        return False


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest at `path`, verified.

    Raises:
        CheckpointError: there is none, its checksum differs, or it is invalid.
    """
    try:
        with refusals(path, "read"):
            if not path.exists():
                raise CheckpointError(f"{path} does not exist", expected="a checkpoint", do="check the path")
            content = (path / MANIFEST).read_bytes()
        if (text := unsealed(content)) is None:
            raise ValueError("its checksum differs")
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] != TAG:
            raise ValueError("it has another format")
        if manifest["version"] > VERSION:
            raise CheckpointError(
                f"{path} has version {manifest['version']}", expected=f"at most {VERSION}",
                do="read it with a newer stratagem-checkpoints",
            )  # fmt: skip
        for name in files_of(manifest):
            _check_file(path, name, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(path, "a sharded checkpoint", getattr(error, "strerror", None) or error) from error
    return manifest


def _check_file(path: Path, name: str, manifest: dict[str, Any]) -> None:
    if name in ("", ".", "..", MANIFEST) or "/" in name or os.sep in name:
        raise ValueError(f"it names {name!r}, which is not a file in this folder")
    file = path / name
    if not is_remote(path) and file.is_symlink():
        raise ValueError(f"{name} is a link out of the folder")
    with refusals(file, "read"):
        size = size_of(file) if is_remote(file) else file.stat().st_size
    ends = [_at(piece) + piece["bytes"] for piece in manifest["pieces"] if _file(piece) == name]
    if (name == TENSORS and size != manifest["bytes"]) or size < max(ends, default=0):
        raise ValueError(f"{name} has another size")


def files_of(manifest: Mapping[str, Any]) -> set[str]:
    """Return the names of the files that have pieces."""
    return {_file(piece) for piece in manifest["pieces"]} or {TENSORS}


def files_at(path: Path) -> set[str]:
    """Return the names of all files of the checkpoint at `path`; of a damaged one, those that are known."""
    files = {MANIFEST, TENSORS}
    with contextlib.suppress(CheckpointError):
        files |= files_of(read_manifest(path))
    return files


def _file(piece: Mapping[str, Any]) -> str:
    return str(piece.get("file", TENSORS))


def _at(piece: Mapping[str, Any]) -> int:
    return int(piece.get("at", piece["offset"]))


def _gaps(manifest: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the gaps between pieces, which are padding up to the next tensor."""
    end = 0
    for piece in sorted(manifest["pieces"], key=lambda piece: piece["offset"]):
        if piece["offset"] > end:
            yield end, piece["offset"]
        end = max(end, piece["offset"] + piece["bytes"])
    if end < manifest["bytes"]:
        yield end, manifest["bytes"]


def verify(path: Path, manifest: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Compare every `world_size`-th piece with its checksum, starting at `rank`.

    Raises:
        CheckpointError: names the first piece that differs.
    """
    remote = is_remote(path)

    def check(piece: Mapping[str, Any]) -> None:
        if remote:
            fetch(path, piece)
        elif checksum(path / _file(piece), _at(piece), piece["bytes"]) != piece["xxh3_128"]:
            raise _differs(path, piece)

    with refusals(path, "read"), ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, manifest["pieces"][rank::world_size]):
            pass
        if rank == 0 and files_of(manifest) == {TENSORS} and not remote:
            with (path / TENSORS).open("rb") as file:
                for begin, end in _gaps(manifest):
                    file.seek(begin)
                    if any(file.read(end - begin)):
                        raise _differs(path, {"offset": begin})


def fetch(path: Path, piece: Mapping[str, Any]) -> bytes:
    """Return the content of a piece, verified."""
    where = path / _file(piece), _at(piece), piece["bytes"]
    content = read_range(*where) if is_remote(path) else b"".join(map(bytes, chunks(*where)))
    if xxhash.xxh3_128_hexdigest(content) != piece["xxh3_128"]:
        raise _differs(path, piece)
    return content


def _differs(path: Path, piece: Mapping[str, Any]) -> CheckpointError:
    return damaged(path, f"bytes from {piece['offset']} of its tensors differ")
