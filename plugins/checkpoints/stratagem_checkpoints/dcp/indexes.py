"""Read and verify the two indexes of a folder: torch's pickle, with an allow list, and ``stratagem.json``."""

from __future__ import annotations

import enum
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from stratagem.api.paths import is_remote
from stratagem.errors import CheckpointError
from stratagem_checkpoints import engine
from stratagem_checkpoints.engine import damaged
from stratagem_checkpoints.raw_bytes import checksum, sealed, unsealed

INDEX, MANIFEST = ".metadata", "stratagem.json"
_TAG, _VERSION = "stratagem dcp checkpoint", 1
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


def encoded(content: dict[str, Any], folder: Path) -> bytes:
    """Return `stratagem.json` for a `folder` whose other files are complete, with its own checksum."""
    files = content["files"] | {INDEX: described(folder / INDEX)}
    return sealed({"format": _TAG, "version": _VERSION} | content | {"files": files})


def described(file: Path) -> dict[str, Any]:
    """Return size and checksum of a file."""
    size = file.stat().st_size
    return {"bytes": size, "xxh3_128": checksum(file, 0, size)}


def read_verified(path: Path, rank: int = 0, world_size: int = 1) -> tuple[dict[str, Any] | None, Metadata]:
    """Return the content of `stratagem.json`, if there is one, and torch's index.

    Every `world_size`-th file is compared with its checksum, starting at `rank`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    if is_remote(path) or not path.exists():
        raise CheckpointError(f"{path} does not exist", expected="a local checkpoint folder", do="check the path")
    manifest, index = read_manifest(path), read_index(path)
    for name, entry in sorted(manifest["files"].items())[rank::world_size] if manifest is not None else ():
        try:
            _check_name(path, name)
            same = described(path / name) == entry
        except (ValueError, OSError) as error:
            reason = f"{name}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            raise unreadable(path, reason) from error
        if not same:
            raise damaged(path, f"{name} differs")
    return manifest, index


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the content of `stratagem.json`, verified; None if there is no such file."""
    try:
        text = unsealed((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    if text is None:
        raise unreadable(path, f"the checksum of {MANIFEST} differs")
    try:
        manifest: dict[str, Any] = json.loads(text)
        known = manifest.get("format") == _TAG and manifest.get("version", 0) <= _VERSION
        _ = [manifest[key] for key in ("names", "state")], [entry["bytes"] for entry in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(path, f"{MANIFEST}: {type(error).__name__}: {error}") from error
    if not known:
        raise CheckpointError(
            f"{path} has version {manifest.get('version')}", expected=f"at most {_VERSION}",
            do="read it with a newer stratagem-checkpoints",
        )  # fmt: skip
    return manifest


def read_index(path: Path) -> Metadata:
    """Return torch's index.

    Raises:
        CheckpointError: it is not one, or names a file elsewhere.
    """
    try:
        with (path / INDEX).open("rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("it is not an index")
        for entry in (index.storage_data or {}).values():
            _check_name(path, entry.relative_path)
    except Exception as error:
        raise unreadable(path, f"{INDEX}: {error}") from error
    return index


def unreadable(path: Path, reason: str) -> CheckpointError:
    """Return the error to raise if the folder `path` is damaged."""
    return engine.unreadable(path, "a checkpoint of torch.distributed", reason)


def _check_name(path: Path, name: str) -> None:
    if "/" in name or name in ("", ".", "..") or (path / name).is_symlink():
        raise ValueError(f"it names {name!r}, which is not a file in this folder")


def _member(cls: Any, name: str) -> Any:
    """Replace getattr, with which newer Pythons pickle members of an enumeration."""
    if isinstance(cls, type) and issubclass(cls, enum.Enum) and name in cls.__members__:
        return cls[name]
    raise pickle.UnpicklingError(f"it uses {name!r} of {cls!r}, which no index needs")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "pathlib._local":  # where Python 3.13 keeps the classes
            module = "pathlib"
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it uses {module}.{name}, which no index needs")
