"""Find the values of tensors in torch's files, so that they are mapped or copied rather than loaded as a whole.

[Note: pieces of a tensor]
Each ``.distcp`` file is a sequence of files of `torch.save`, one for each piece of a tensor: all of it, or the shard of
one rank. A tensor of one piece is mapped where it is, if its dtype may begin there. Pieces that are rows of a tensor
are copied one after the other: into memory if this process is alone on its node, else into a temporary file that the
processes of the node share, of which each process fills a part and maps what it uses. All other tensors (columns,
strided ones, other programs' encodings) are left to torch, which reads them whole.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from attrs import frozen
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stratagem.checkpoint.mapped_file import SMALL, mapped_tensors
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from stratagem.api import RunContext

_CHUNK = 4 << 20
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
        with zipfile.ZipFile(_Slice(file, info.offset, info.length)) as archive:
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
    file.seek(info.offset + record.header_offset)
    header = file.read(30)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return int(info.offset + record.header_offset + 30 + name + extra + begin)


class _Slice(io.RawIOBase):
    """A part of a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, origin: int = os.SEEK_SET) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[origin], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._begin + self._at)
        content = self._file.read(min(len(view), max(self._length - self._at, 0)))
        view[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Description(pickle.Unpickler):
    """Reads the dtype, storage, offset, shape and strides of a tensor; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (*storage, offset, shape, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and (dtype := _DTYPES.get(name)) is not None:
            return dtype
        raise pickle.UnpicklingError(f"it uses {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _ = pid
        return dtype, key


_DTYPES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


# --- Reading -----------------------------------------------------------------------------------------------------


def tensors_of(
    path: Path, pieces: Mapping[str, list[Piece]], index: Metadata, run: RunContext
) -> dict[str, torch.Tensor]:
    """Return the tensors that have `pieces`. Collective.

    Raises:
        CheckpointError: a file cannot be read, or the temporary one cannot be written; on all ranks.
    """
    world = run.world
    assert world is not None, "set before collectives exist"
    entries: Mapping[str, Any] = index.state_dict_metadata
    one = {
        name: parts
        for name, parts in pieces.items()
        if len(parts) == 1 and parts[0].offset % entries[name].properties.dtype.itemsize == 0
    }
    several = {name: parts for name, parts in pieces.items() if name not in one}
    tensors: dict[str, torch.Tensor] = {}
    error = None
    try:
        for file in dict.fromkeys(parts[0].file for parts in one.values()):
            here = {name: parts[0] for name, parts in one.items() if parts[0].file == file}
            wanted = [(piece.offset, entries[n].properties.dtype, entries[n].size) for n, piece in here.items()]
            tensors.update(zip(here, mapped_tensors(file, wanted), strict=True))
        if world.local_world_size == 1:
            tensors.update((name, _in_memory(parts, entries[name])) for name, parts in several.items())
    except (OSError, ValueError) as caught:
        error = _unreadable(path, caught)
    run.collectives.fail_together(error)
    if world.local_world_size > 1 and several:
        tensors.update(_shared(path, several, entries, run))
    return tensors


def _in_memory(parts: list[Piece], entry: Any) -> torch.Tensor:
    """Return a tensor of these parts, in memory that returns to the system when it is freed: malloc may keep it."""
    size = _size(entry)
    memory = mmap.mmap(-1, size)
    for piece in parts:
        for done, content in _chunks(piece):
            memory[piece.at + done : piece.at + done + len(content)] = content
    flat = torch.frombuffer(memory, dtype=entry.properties.dtype)
    return flat.view(entry.size)


def _shared(
    path: Path, several: Mapping[str, list[Piece]], entries: Mapping[str, Any], run: RunContext
) -> dict[str, torch.Tensor]:
    """Return the tensors of `several` pieces, mapped from a temporary file that the processes of the node share."""
    world, collectives = run.world, run.collectives
    assert world is not None, "set before collectives exist"
    starts, end = {}, 0
    for each, parts in several.items():
        starts[each] = end
        end += -(-sum(piece.size for piece in parts) // _ALIGNMENT) * _ALIGNMENT
    name, error = None, None
    tensors: dict[str, torch.Tensor] = {}
    try:
        if world.local_rank == 0:
            descriptor, name = tempfile.mkstemp(prefix="stratagem-", suffix=".bin")
            os.truncate(descriptor, end)
            os.close(descriptor)
    except OSError as caught:
        error = _too_small(path, end, caught)
    try:
        collectives.fail_together(error)
        names = {node: each for node, each in collectives.all_gather_object((world.node_rank, name)) if each}
        file = Path(names[world.node_rank])
        try:
            mine = list(several)[world.local_rank :: world.local_world_size]
            _fill(file, [(starts[each] + piece.at, piece) for each in mine for piece in several[each]])
        except OSError as caught:
            error = _too_small(path, end, caught)
        except ValueError as caught:
            error = _unreadable(path, caught)
        collectives.fail_together(error)
        try:
            wanted = [(starts[each], entries[each].properties.dtype, entries[each].size) for each in several]
            tensors = dict(zip(several, mapped_tensors(file, wanted), strict=True))
        except (OSError, ValueError) as caught:
            error = _unreadable(path, caught)
        collectives.fail_together(error)
    finally:
        if name is not None:
            os.unlink(name)
    return tensors


def _fill(target: Path, placed: list[tuple[int, Piece]]) -> None:
    descriptor = os.open(target, os.O_WRONLY)
    try:
        for offset, piece in placed:
            for done, content in _chunks(piece):
                written = 0
                while written < len(content):
                    written += os.pwrite(descriptor, content[written:], offset + done + written)
    finally:
        os.close(descriptor)


def _chunks(piece: Piece) -> Iterator[tuple[int, memoryview]]:
    """Yield the content of `piece`, each chunk with the number of bytes before it; it is valid until the next."""
    buffer, done = memoryview(bytearray(min(_CHUNK, piece.size))), 0
    with piece.file.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while done < piece.size:
            count = file.readinto(buffer[: piece.size - done])
            if not count:
                raise ValueError(f"{piece.file} is too short")
            yield done, buffer[:count]
            done += count


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as a checkpoint of torch.distributed ({error})",
        expected="the content that was written", do="use another one",
    )  # fmt: skip


def _too_small(path: Path, size: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{tempfile.gettempdir()} is too small for the {size} bytes of {path} ({error.strerror or error})",
        do="set TMPDIR to a folder with enough free space",
    )
