"""Save in the layout of torch.distributed.checkpoint, which plain PyTorch and other trainers read and write.

[Note: torch's files and ours]
torch keeps an index in ``.metadata``, a pickle, and tensors in ``__<rank>_<n>.distcp``. Reading the index allows only
the classes that it needs, and refuses paths outside the folder. Tensors are named by their path in the state
(``state_dict.layer.weight``). All other values, and the checksum of every file, are in ``stratagem.json``. A folder
without that file was written by another program, and is read as a model.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from attrs import define, field
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from stratagem.api import CheckpointFormat, hookimpl
from stratagem.api.json_tree import decode, encode
from stratagem.api.paths import is_remote, modified_at
from stratagem.checkpoint.atomic import StagedFolder, explained, remove_folder
from stratagem.checkpoint.cpu_copies import CPUCopies
from stratagem.checkpoint.distinct import gather_distinct
from stratagem.errors import CheckpointError
from stratagem_checkpoint_dcp.pieces import Piece, pieces_of, tensors_of

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

_INDEX, _MANIFEST = ".metadata", "stratagem.json"
_TAG, _VERSION = "stratagem dcp checkpoint", 1
_CHUNK = 4 << 20
_SMALL = 1 << 20
#: Classes that an index may have: data classes and enumerations, whose construction has no side effects.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


@define(eq=False, kw_only=True)
class DCPCheckpoint(CheckpointFormat):
    """Write one folder from all ranks; a reader maps what it uses. See [Note: torch's files and ours]."""

    #: Write in the background: training waits only until each rank has copied its part of the state.
    async_save: bool = False
    _copies: CPUCopies = field(init=False, factory=CPUCopies)

    suffix: ClassVar[str] = ".dcp"
    takes_shards: ClassVar[bool] = True

    @hookimpl
    def save_checkpoint(self, state: dict[str, Any], path: Path, run: RunContext) -> bool:
        content, error = None, None
        run.wait_for_saves()  # one copy at a time
        try:
            if is_remote(path):
                raise CheckpointError(f"{path} is a URL", expected="a local folder, for torch's layout")
            content = _Content(state)
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        assert content is not None, "fail_together raised on all ranks otherwise"
        content.divide(run)
        if self.async_save:
            content.tensors = {name: _copied(tensor, self._copies) for name, tensor in content.tensors.items()}
            self._copies.wait()
        write = functools.partial(_write, path, content, run.rank, self.recognises)
        run.save_in_background(write, background=self.async_save)
        return True

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        manifest, index, error = None, None, None
        pieces: dict[str, list[Piece]] = {}
        try:
            manifest, index = _described(path)
            if manifest is not None:  # each file is verified by one rank
                _verify(path, dict(sorted(manifest["files"].items())[run.rank :: run.world_size]))
            pieces = pieces_of(path, index)
        except (CheckpointError, OSError) as caught:
            error = caught if isinstance(caught, CheckpointError) else _unreadable(path, str(caught))
        run.collectives.fail_together(error)
        assert index is not None, "fail_together raised on all ranks otherwise"
        tensors = tensors_of(path, pieces, index, run)
        state: dict[str, Any] = {}
        try:
            state = _decoded(path, manifest, index, tensors)
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        return state

    @hookimpl
    def teardown(self) -> None:
        self._copies = CPUCopies()

    def recognises(self, path: Path) -> bool:
        return not is_remote(path) and (path / _INDEX).is_file()

    def is_whole(self, path: Path) -> bool:
        try:
            manifest = _read_manifest(path)
            _read_index(path)
            if manifest is not None:
                _verify(path, manifest["files"])
        except CheckpointError:
            return False
        return True

    def saved_at(self, path: Path) -> float:
        return modified_at(path / _INDEX)

    def remove(self, path: Path) -> None:
        if not self.recognises(path) or not (path / _MANIFEST).is_file():
            raise CheckpointError(f"{path} was not written by stratagem", do="delete it yourself; nothing was deleted")
        remove_folder(path, _files_at(path))


def _files_at(path: Path) -> set[str]:
    """Return the names of the files of the checkpoint at `path`; without a readable list, by torch's names."""
    try:
        manifest = _read_manifest(path)
    except CheckpointError:
        manifest = None
    named = [each.name for each in path.glob("__*_*.distcp")] if manifest is None else manifest["files"]
    return {_INDEX, _MANIFEST, *named}


# --- Writing -----------------------------------------------------------------------------------------------------


class _Content:
    """The tensors of a state by name, and the other values as JSON."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: list[str] = []
        self.tree = encode(dict(state), self._add)

    def _add(self, tensor: torch.Tensor, name: str) -> int:
        self.names.append(name)
        self.tensors[name] = tensor
        return len(self.names) - 1

    def divide(self, run: RunContext) -> None:
        """Keep the tensors that this rank writes. Collective."""
        lacks = tuple(name for name in self.tensors if self.tensors[name].is_meta)
        absent = {rank: set(theirs) for rank, theirs in gather_distinct(run.collectives, lacks)}
        mine = {name: tensor for name, tensor in self.tensors.items() if _writes(name, tensor, absent, run.rank)}
        self.tensors = mine


def _copied(tensor: torch.Tensor, copies: CPUCopies) -> torch.Tensor:
    """Return a copy of `tensor`, or of this rank's shard of it, on the CPU; complete after ``copies.wait()``."""
    if not isinstance(tensor, DTensor):
        return copies.take(tensor)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
    return DTensor(copies.take(tensor.to_local()), spec, requires_grad=False)


def _write(path: Path, content: _Content, rank: int, is_ours: Callable[[Path], bool], collectives: Collectives) -> None:
    """Write `content` to the folder `path`, atomically. Collective.

    Raises:
        CheckpointError: the folder cannot be written, or another run uses it; on all ranks.
    """
    staged, error = StagedFolder(path), None
    sums: dict[str, dict[str, Any]] = {}
    try:
        try:
            if rank == 0:
                staged.begin(is_ours, _files_at)
        except (CheckpointError, OSError) as caught:
            error = explained(caught, path)
        collectives.fail_together(error)
        try:
            _save(content.tensors, staged.path, collectives)
            sums = _checksums(staged.path, f"__{rank}_")
        except (OSError, dcp.CheckpointException) as caught:
            error = _of_all_ranks(caught, path)
        collectives.fail_together(error)
        all_sums = collectives.all_gather_object(sums)
        if rank == 0:
            try:
                files = {name: entry for each in all_sums for name, entry in each.items()}
                _write_manifest(staged.path, {"names": content.names, "state": content.tree, "files": files})
                staged.publish()
            except OSError as caught:
                error = explained(caught, path)
        collectives.fail_together(error)
    finally:
        staged.clear_away()


def _writes(name: str, tensor: torch.Tensor, absent: Mapping[int, set[str]], rank: int) -> bool:
    """Return whether this rank writes `tensor`. Small ones may differ between ranks, so only one rank writes them."""
    if tensor.is_meta:
        return False
    small = not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= _SMALL
    return not small or rank == next(first for first, lacks in absent.items() if name not in lacks)


def _save(tensors: dict[str, torch.Tensor], folder: Path, collectives: Any) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a single process without a process group
        if collectives.world_size == 1:
            dcp.save(tensors, storage_writer=writer, no_dist=True)
        else:
            dcp.save(tensors, storage_writer=writer, process_group=collectives.group)


def _checksums(folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Return size and checksum of each file of this rank."""
    return {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}
        for path in folder.glob(f"{prefix}*.distcp")
    }


def _checksum(path: Path) -> str:
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["files"][_INDEX] = {"bytes": (folder / _INDEX).stat().st_size, "xxh3_128": _checksum(folder / _INDEX)}
    text = json.dumps({"format": _TAG, "version": _VERSION} | manifest, ensure_ascii=False).encode()
    with (folder / _MANIFEST).open("wb") as file:
        file.write(text + f"\n{xxhash.xxh3_128_hexdigest(text)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _of_all_ranks(error: BaseException, path: Path) -> CheckpointError:
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return explained(first if isinstance(first, OSError) else error, path)


# --- Reading -----------------------------------------------------------------------------------------------------


def _described(path: Path) -> tuple[dict[str, Any] | None, Metadata]:
    """Return the content of `stratagem.json`, if there is one, and torch's index."""
    if is_remote(path) or not path.exists():
        raise CheckpointError(f"{path} does not exist", expected="a local checkpoint folder", do="check the path")
    return _read_manifest(path), _read_index(path)


def _decoded(
    path: Path, manifest: dict[str, Any] | None, index: Metadata, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the state at `path`: `tensors`, and what torch reads."""
    rest = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name not in tensors
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a single process without a process group
            dcp.load(rest, storage_reader=_Reader(path), no_dist=True)
        tensors |= rest
        if manifest is None:
            return _foreign_model(tensors, index, path)
        state: dict[str, Any] = decode(manifest["state"], [tensors[name] for name in manifest["names"]])
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise _unreadable(path, f"{type(error).__name__}: {text[0][:120] if text else ''}") from error
    return state


def _foreign_model(tensors: dict[str, torch.Tensor], index: Metadata, path: Path) -> dict[str, Any]:
    """Return the model of a folder that another program wrote."""
    skipped = sorted(set(index.state_dict_metadata) - set(tensors))
    for prefix in ("state_dict.", "model.", "module."):
        named = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if named:
            skipped += sorted(name for name in tensors if not name.startswith(prefix))
            break
    else:
        named = tensors
    if skipped:
        shown = ", ".join(skipped[:3]) + (f" and {len(skipped) - 3} more" if len(skipped) > 3 else "")
        warnings.warn(f"{path} was written by another program: only its model is read, not {shown}", stacklevel=2)
    return {"state_dict": named}


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the content of `stratagem.json`, verified; None if there is no such file."""
    try:
        text, _, digest = (path / _MANIFEST).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if xxhash.xxh3_128_hexdigest(text).encode() != digest.strip():
        raise _unreadable(path, f"the checksum of {_MANIFEST} differs")
    try:
        manifest: dict[str, Any] = json.loads(text)
        known = manifest.get("format") == _TAG and manifest.get("version", 0) <= _VERSION
        _ = [manifest[key] for key in ("names", "state")], [entry["bytes"] for entry in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{_MANIFEST}: {type(error).__name__}: {error}") from error
    if not known:
        raise CheckpointError(
            f"{path} has version {manifest.get('version')}", expected=f"at most {_VERSION}",
            do="read it with a newer stratagem-checkpoint-dcp",
        )  # fmt: skip
    return manifest


def _verify(path: Path, files: Mapping[str, Any]) -> None:
    for name, entry in files.items():
        file = path / name
        if "/" in name or name in ("", ".", "..") or file.is_symlink():
            raise _unreadable(path, f"it names {name!r}, which is not a file in this folder")
        try:
            same = file.stat().st_size == entry["bytes"] and _checksum(file) == entry["xxh3_128"]
        except OSError as error:
            raise _unreadable(path, f"{name}: {error.strerror or error}") from error
        if not same:
            raise CheckpointError(
                f"{path} is not what was written: {name} differs", expected="the content that was written",
                do="use an older checkpoint",
            )  # fmt: skip


def _member(cls: Any, name: str) -> Any:
    """Replace getattr, with which newer Pythons pickle members of an enumeration."""
    if isinstance(cls, type) and issubclass(cls, enum.Enum) and name in cls.__members__:
        return cls[name]
    raise pickle.UnpicklingError(f"it uses {name!r} of {cls!r}, which no index needs")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it uses {module}.{name}, which no index needs")


def _read_index(path: Path) -> Metadata:
    try:
        with (path / _INDEX).open("rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("it is not an index")
        for entry in (index.storage_data or {}).values():
            name = entry.relative_path
            if "/" in name or name in ("", ".", "..") or (path / name).is_symlink():
                raise pickle.UnpicklingError(f"it names {name!r}, which is not a file in this folder")
    except Exception as error:
        raise _unreadable(path, f"{_INDEX}: {error}") from error
    return index


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        index = _read_index(Path(self.path))
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        return index


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as a checkpoint of torch.distributed ({reason})",
        expected="the content that was written", do="use another one; no code of this one was executed",
    )  # fmt: skip
