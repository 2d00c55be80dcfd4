"""Find the values of tensors in torch's files, so that they are mapped or copied rather than loaded as a whole.

[Note: pieces of a tensor]
Each ``.distcp`` file is a sequence of files of `torch.save`, one for each piece of a tensor: all of it, or the shard of
one rank. A tensor of one piece is mapped where it is, if its dtype may begin there. Pieces that are rows of a tensor
are copied one after the other: into memory if this process is alone on its node, else into a temporary file that the
processes of the node share, of which each process fills a part and maps what it uses. All other tensors (columns,
strided ones, other programs' encodings) are left to torch, which reads them whole.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from attrs import frozen
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem_checkpoints.dcp.indexes import unreadable
from stratagem_checkpoints.mapped_file import SMALL, mapped_tensors
from stratagem_checkpoints.raw_bytes import begin_of_entry, chunks, opened, write_at
from stratagem_checkpoints.shared_file import enough_space, shared_file

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Offsets in the temporary file are multiples of this, so that any dtype can be mapped.
_ALIGNMENT = 64


@frozen
class Piece:
    """Consecutive bytes of a tensor: they begin at `at` in the tensor, and at `offset` in `file`."""

    file: Path
    offset: int
    at: int
    size: int


def pieces_of(path: Path, index: Metadata) -> dict[str, list[Piece]]:
    """Return the pieces of large tensors, except those that torch has to read; see [Note: pieces of a tensor].

    Raises:
        OSError: a file cannot be read.
    """
    files: dict[str, BinaryIO] = {}
    try:
        found = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and _size(entry) > SMALL:
                found[name] = _pieces(name, entry, index.storage_data or {}, path, files)
        return {name: pieces for name, pieces in found.items() if pieces is not None}
    finally:
        for file in files.values():
            file.close()


def _size(entry: TensorStorageMetadata) -> int:
    return math.prod(entry.size) * entry.properties.dtype.itemsize


def _pieces(
    name: str, entry: TensorStorageMetadata, stored: Mapping[Any, Any], path: Path, files: dict[str, BinaryIO]
) -> list[Piece] | None:
    dtype, rest = entry.properties.dtype, list(entry.size[1:])
    row, pieces, end = math.prod(rest) * dtype.itemsize, [], 0
    for chunk in sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets)):
        info = stored.get(MetadataIndex(name, chunk.offsets))
        if info is None or getattr(info, "transform_descriptors", None) or list(chunk.sizes[1:]) != rest:
            return None
        size = math.prod(chunk.sizes) * dtype.itemsize
        at = chunk.offsets[0] * row if chunk.offsets else 0
        if at != end or any(chunk.offsets[1:]):
            return None
        if info.relative_path not in files:
            files[info.relative_path] = (path / info.relative_path).open("rb")
        offset = _values(files[info.relative_path], info, dtype, chunk.sizes) if size else 0
        if offset is None:
            return None
        pieces += [Piece(path / info.relative_path, offset, at, size)] if size else []
        end = at + size
    return pieces if end == _size(entry) else None


def _values(file: BinaryIO, info: Any, dtype: torch.dtype, sizes: Sequence[int]) -> int | None:
    """Return where the values of a tensor of these sizes begin in `file`; None if they are not consecutive."""
    try:
        with zipfile.ZipFile(cast("Any", _Slice(file, info.offset, info.length))) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            described = _Description(io.BytesIO(archive.read(names["data.pkl"]))).load()
            kind, key, skipped, shape, strides = described
            record = archive.getinfo(names[f"data/{key}"])
    except (pickle.UnpicklingError, zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, EOFError):
        return None
    expected = torch.empty(tuple(sizes), dtype=dtype, device="meta")
    size = expected.numel() * dtype.itemsize
    if (kind, tuple(shape), tuple(strides)) != (dtype, tuple(sizes), expected.stride()):
        return None
    begin = skipped * dtype.itemsize
    if record.compress_type != zipfile.ZIP_STORED or not 0 <= begin <= record.file_size - size:
        return None
    return int(begin) + begin_of_entry(file, info.offset + record.header_offset)


class _Slice:
    """A part of a file, as a file that a zip file is read from."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, origin: int = os.SEEK_SET) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[origin], 0)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._begin + self._at)
        content = self._file.read(left if size < 0 else min(size, left))
        self._at += len(content)
        return content


class _Description(pickle.Unpickler):
    """Reads the dtype, storage, offset, shape and strides of a tensor; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (*storage, offset, shape, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        dtype = getattr(getattr(torch, name, None), "_dtype", None)  # of torch.FloatStorage and others
        if module == "torch" and isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it uses {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _ = pid
        return dtype, key


# --- Reading -----------------------------------------------------------------------------------------------------


def tensors_of(path: Path, index: Metadata, run: RunContext) -> dict[str, torch.Tensor]:
    """Return the tensors that torch does not have to read. Collective.

    Raises:
        CheckpointError: a file cannot be read, or the temporary one cannot be written; on all ranks.
    """
    assert run.world is not None, "set before collectives exist"
    is_alone, entries = run.world.local_world_size == 1, index.state_dict_metadata

    def found() -> tuple[dict[str, torch.Tensor], dict[str, list[Piece]]]:
        with _reading(path):
            pieces = pieces_of(path, index)
            tensors = _mapped(pieces, entries)
            several = {name: parts for name, parts in pieces.items() if name not in tensors}
            if is_alone:
                tensors |= {name: _in_memory(parts, entries[name]) for name, parts in several.items()}
            return tensors, {} if is_alone else several

    tensors, several = on_all_ranks(run.collectives, found)
    return tensors | _shared(path, several, entries, run) if several else tensors


def _mapped(pieces: Mapping[str, list[Piece]], entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of one piece whose dtype may begin where it is."""
    by_file: dict[Path, dict[str, Any]] = {}
    for name, parts in pieces.items():
        dtype, (first, *others) = entries[name].properties.dtype, parts
        if not others and first.offset % dtype.itemsize == 0:
            by_file.setdefault(first.file, {})[name] = (first.offset, dtype, entries[name].size)
    tensors: dict[str, torch.Tensor] = {}
    for file, wanted in by_file.items():
        tensors.update(zip(wanted, mapped_tensors(file, list(wanted.values())), strict=True))
    return tensors


def _in_memory(parts: list[Piece], entry: Any) -> torch.Tensor:
    """Return a tensor of these parts, in memory that returns to the system when it is freed: malloc may keep it."""
    memory = mmap.mmap(-1, _size(entry))
    for piece in parts:
        for at, content in _chunks(piece):
            memory[at : at + len(content)] = content
    flat = torch.frombuffer(memory, dtype=entry.properties.dtype)
    return flat.view(entry.size)


def _shared(
    path: Path, several: Mapping[str, list[Piece]], entries: Mapping[str, Any], run: RunContext
) -> dict[str, torch.Tensor]:
    """Return the tensors of `several` pieces, mapped from a temporary file that the processes of the node share."""
    assert run.world is not None, "set before collectives exist"
    wanted, end = {}, 0
    for name in several:
        wanted[name] = (end, entries[name].properties.dtype, entries[name].size)
        end += -(-_size(entries[name]) // _ALIGNMENT) * _ALIGNMENT
    mine = list(several)[run.world.local_rank :: run.world.local_world_size]

    def fill(target: Path) -> None:
        with _reading(path), enough_space(path, end), opened(target) as file:
            for name in mine:
                for at, content in itertools.chain(*map(_chunks, several[name])):
                    write_at(file, wanted[name][0] + at, content)

    def tensors_in(file: Path) -> list[torch.Tensor]:
        with _reading(path):
            return mapped_tensors(file, list(wanted.values()))

    with shared_file(path, end, run) as file:
        on_all_ranks(run.collectives, lambda: fill(file))
        return dict(zip(wanted, on_all_ranks(run.collectives, lambda: tensors_in(file)), strict=True))


def _chunks(piece: Piece) -> Iterator[tuple[int, memoryview]]:
    """Yield the content of `piece`, each chunk with where it begins in the tensor; it is valid until the next."""
    at = piece.at
    for content in chunks(piece.file, piece.offset, piece.size):
        yield at, content
        at += len(content)
    if at < piece.at + piece.size:
        raise ValueError(f"{piece.file} is too short")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise unreadable(path, str(error)) from error
