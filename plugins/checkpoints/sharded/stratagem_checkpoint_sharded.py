"""Every rank writes its part of the state into one folder; any number of ranks reads what it needs of it.

[Note: one file for all]
``tensors.bin`` holds each tensor whole, row after row, whoever wrote which rows: ranks write at their own places of one
file, and the file does not tell how many they were. So a reader maps it into memory as whole tensors, and only the
pages it touches cost anything: a strategy that keeps a shard reads a shard. ``manifest.json`` is written last and names
every tensor, every piece with its checksum, and all that is no tensor. Nothing in either is ever executed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from attrs import define
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem import CheckpointFormat, hookimpl
from stratagem.errors import CheckpointError

_MANIFEST, _TENSORS = "manifest.json", "tensors.bin"
_TAG, _VERSION = "stratagem sharded checkpoint", 1
#: Tensors begin at multiples of this, so that any dtype can be mapped.
_ALIGNMENT = 64
_PIECE = 64 << 20
#: Bytes up to which a tensor is read at once rather than mapped.
_SMALL = 1 << 20
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


@define(eq=False, kw_only=True)
class ShardedCheckpoint(CheckpointFormat):
    """A folder that all ranks write together; see [Note: one file for all]."""

    suffix: ClassVar[str] = ".ckpt"
    takes_shards: ClassVar[bool] = True

    @hookimpl
    def save_checkpoint(self, state, path, run):
        path, staged, error, plan = Path(path), None, None, None
        try:
            plan = _Plan(state, run.rank, run.world_size)
            staged = path.with_name(f".{path.name}.staged")
            if run.is_global_zero:
                _begin(path, staged, plan.size)
        except (CheckpointError, OSError) as caught:
            error = _explained(caught, path)
        _together(run, error, staged)
        pieces: list[dict[str, Any]] = []
        try:
            pieces = plan.write(staged / _TENSORS)
        except OSError as caught:
            error = _explained(caught, path)
        _together(run, error, staged)
        everybody = run.collectives.all_gather_object(pieces)
        if run.is_global_zero:
            try:
                _finish(path, staged, plan.manifest([piece for each in everybody for piece in each]))
            except OSError as caught:
                error = _explained(caught, path)
        _together(run, error, staged)
        return True

    @hookimpl
    def load_checkpoint(self, path, into, run):
        state, error = None, None
        try:
            manifest = _read_manifest(Path(path))
            # Together the ranks read every byte once.
            _verify(Path(path), manifest["pieces"][run.rank :: run.collectives.world_size])
            state = _mapped(Path(path), manifest)
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        return state

    def recognises(self, path: Path) -> bool:
        try:
            with (path / _MANIFEST).open("rb") as file:
                return _TAG.encode() in file.read(200)
        except OSError:
            return False

    def is_whole(self, path: Path) -> bool:
        try:
            _verify(path, _read_manifest(path)["pieces"])
        except CheckpointError:
            return False
        return True

    def remove(self, path: Path) -> None:
        if not self.recognises(path):
            raise CheckpointError(f"{path} is no sharded checkpoint", do="nothing was deleted")
        shutil.rmtree(path)


# --- Writing -----------------------------------------------------------------------------------------------------


class _Plan:
    """Where each tensor of a state goes, the same on all ranks, and which pieces this rank writes."""

    def __init__(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        self.size, self.rank, self.world_size = 0, rank, world_size
        self.tensors: list[dict[str, Any]] = []
        self._sources: list[torch.Tensor] = []
        self.tree = self._encode(state, "")

    def _encode(self, value: Any, path: str) -> Any:
        """Return `value` as JSON has it, tensors replaced by their numbers."""
        if isinstance(value, torch.Tensor):
            return {"$": "tensor", "number": self._place(value)}
        if isinstance(value, Mapping):
            pairs = [(self._encode(k, path), self._encode(v, f"{path}.{k}".lstrip("."))) for k, v in value.items()]
            plain = all(isinstance(key, str) for key in value) and "$" not in value
            return dict(pairs) if plain else {"$": "mapping", "items": [list(pair) for pair in pairs]}
        if isinstance(value, list | tuple):
            items = [self._encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$": "tuple", "items": items}
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return (
                value if value == value and abs(value) != float("inf") else {"$": "float", "text": repr(float(value))}
            )
        if isinstance(value, str | int):  # enumerations that are text or numbers
            return str(value) if isinstance(value, str) else int(value)
        if isinstance(value, Path):
            return str(value)
        raise CheckpointError(
            f"{path or 'the checkpoint'} is a {type(value).__name__}",
            expected="tensors, numbers, strings and containers of them: all that can be loaded safely",
            do="convert it in state_dict() or on_save_checkpoint()",
        )

    def _place(self, tensor: torch.Tensor) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors.append({"dtype": dtype, "shape": list(tensor.shape), "offset": self.size})
        self._sources.append(tensor.detach())
        self.size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return len(self.tensors) - 1

    def write(self, path: Path) -> list[dict[str, Any]]:
        """Write this rank's pieces; return where they are and their checksums."""
        pieces = []
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for number, tensor in enumerate(self._sources):
                if isinstance(tensor, DTensor):
                    parts = _shard_of(tensor) if _writes(tensor) else iter(())
                else:  # the same on all ranks: they take turns
                    parts = iter([(0, tensor)]) if number % self.world_size == self.rank else iter(())
                for begin, part in parts:
                    pieces += _write(descriptor, self.tensors[number]["offset"] + begin, part)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return pieces

    def manifest(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "format": _TAG, "version": _VERSION, "bytes": self.size, "tensors": self.tensors,
            "pieces": sorted(pieces, key=lambda piece: piece["offset"]), "state": self.tree,
        }  # fmt: skip


def _writes(tensor: DTensor) -> bool:
    """Whether this rank is the one of its replicas that writes."""
    here = tensor.device_mesh.get_coordinate()
    return all(
        not placement.is_replicate() or position == 0
        for placement, position in zip(tensor.placements, here, strict=True)
    )


def _shard_of(tensor: DTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the contiguous pieces of this rank's shard, each with its first byte within the whole tensor."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    yield from _rows(tensor.to_local(), list(offsets), list(tensor.shape), 0)


def _rows(part: torch.Tensor, offsets: list[int], shape: list[int], begin: int) -> Iterator[tuple[int, torch.Tensor]]:
    if part.numel() == 0:
        return
    inner = part.element_size()
    for size in shape[1:]:
        inner *= size
    first = begin + (offsets[0] * inner if offsets else 0)
    if list(part.shape[1:]) == shape[1:]:
        yield first, part
        return
    for row in range(part.shape[0]):
        yield from _rows(part[row], offsets[1:], shape[1:], first + row * inner)


def _write(descriptor: int, offset: int, tensor: torch.Tensor) -> list[dict[str, Any]]:
    whole = tensor.cpu().contiguous()
    size = whole.numel() * whole.element_size()
    data = memoryview((ctypes.c_char * size).from_address(whole.data_ptr())) if size else memoryview(b"")
    pieces = []
    for begin in range(0, size, _PIECE):
        piece = data[begin : begin + _PIECE]
        written = 0
        while written < len(piece):
            written += os.pwrite(descriptor, piece[written:], offset + begin + written)
        pieces.append({"offset": offset + begin, "bytes": len(piece), "xxh3_128": xxhash.xxh3_128_hexdigest(piece)})
    return pieces


def _begin(path: Path, staged: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not ShardedCheckpoint().recognises(path):
        raise CheckpointError(
            f"{path} exists and is no sharded checkpoint", do="choose another path; nothing was changed"
        )
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    with (staged / _TENSORS).open("wb") as file:
        file.truncate(size)


def _finish(path: Path, staged: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, ensure_ascii=False)
    with (staged / _MANIFEST).open("w", encoding="utf-8") as file:
        file.write(f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(staged)
    if path.exists():
        _exchange(staged, path)
        shutil.rmtree(staged, ignore_errors=True)
    else:
        os.rename(staged, path)
    _sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders at once, so that there is a whole checkpoint at every moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (str(one).encode(), str(other).encode())
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    old = other.with_name(f".{other.name}.old")  # a system that cannot: for a moment only the old one, under this name
    shutil.rmtree(old, ignore_errors=True)
    os.rename(other, old)
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


def _together(run: Any, error: CheckpointError | None, staged: Path | None) -> None:
    """Go on if no rank has an error; else clear away what was staged, and raise on all."""
    try:
        run.collectives.fail_together(error)
    except Exception:
        if run.is_global_zero and staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        raise


# --- Reading -----------------------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", expected="a checkpoint", do="check the path")
    try:
        text, _, rest = (path / _MANIFEST).read_text(encoding="utf-8").partition("\n")
        if xxhash.xxh3_128_hexdigest(text.encode()) != rest.strip():
            raise ValueError("its checksum differs")
        manifest = json.loads(text)
        if manifest["format"] != _TAG:
            raise ValueError("it is of another kind")
        if manifest["version"] > _VERSION:
            raise CheckpointError(
                f"{path} has version {manifest['version']}", expected=f"at most {_VERSION}",
                do="read it with a newer stratagem-checkpoint-sharded",
            )  # fmt: skip
        if (path / _TENSORS).is_symlink():
            raise ValueError(f"{_TENSORS} is a link out of the folder")
        if (path / _TENSORS).stat().st_size != manifest["bytes"]:
            raise ValueError(f"{_TENSORS} has another size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a sharded checkpoint ({getattr(error, 'strerror', None) or error})",
            expected="what was written", do="nothing in it was executed; use another one",
        ) from error  # fmt: skip
    return manifest


def _verify(path: Path, pieces: list[dict[str, Any]]) -> None:
    with (path / _TENSORS).open("rb") as file:
        for piece in pieces:
            file.seek(piece["offset"])
            if xxhash.xxh3_128_hexdigest(file.read(piece["bytes"])) != piece["xxh3_128"]:
                raise CheckpointError(
                    f"{path} is not what was written: bytes from {piece['offset']} of {_TENSORS} differ",
                    expected="the content that its manifest describes",
                    do="use an older checkpoint",
                )


def _mapped(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the state, its tensors mapped: what is not touched costs nothing, and writing to them changes no file."""
    size = manifest["bytes"]
    data = torch.from_file(str(path / _TENSORS), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    tensors = []
    for entry in manifest["tensors"]:
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{path} has a tensor of dtype {entry['dtype']!r}", expected="one that torch knows")
        count = dtype.itemsize
        for length in entry["shape"]:
            count *= length
        if not 0 <= entry["offset"] <= size - count:
            raise CheckpointError(f"{path} has a tensor outside {_TENSORS}", do="use another checkpoint")
        part = data[entry["offset"] : entry["offset"] + count]
        tensor = part.view(dtype).view(entry["shape"]) if count else torch.empty(entry["shape"], dtype=dtype)
        # Small ones are copied: they are no burden, and not all of torch expects a tensor in the middle of a file.
        tensors.append(tensor.clone() if count <= _SMALL else tensor)
    state: dict[str, Any] = _decode(manifest["state"], tensors)
    return state


def _decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _decode(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        return tensors[value["number"]]
    if kind == "float":
        return float(value["text"])
    items = [_decode(item, tensors) for item in value["items"]]
    return tuple(items) if kind == "tuple" else {_hashable(key): item for key, item in items}


def _hashable(key: Any) -> Any:
    return tuple(_hashable(item) for item in key) if isinstance(key, list) else key
