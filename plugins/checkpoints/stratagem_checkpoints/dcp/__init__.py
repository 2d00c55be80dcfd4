"""Save in the layout of torch.distributed.checkpoint, which plain PyTorch and other trainers read and write.

[Note: torch's files and ours]
torch keeps an index in ``.metadata``, a pickle, and tensors in ``__<rank>_<n>.distcp``. Reading the index allows only
the classes that it needs, and refuses paths outside the folder. Tensors are named by their path in the state
(``state_dict.layer.weight``). All other values, and the checksum of every file, are in ``stratagem.json``. A folder
without that file was written by another program, and is read as a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from attrs import define
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from stratagem.api import Collectives, hookimpl
from stratagem.api.json_tree import decode, encode
from stratagem.api.paths import is_remote
from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem.errors import CheckpointError
from stratagem_checkpoints import one_file
from stratagem_checkpoints.cpu_copies import CPUCopies
from stratagem_checkpoints.dcp import indexes
from stratagem_checkpoints.dcp.indexes import INDEX, MANIFEST
from stratagem_checkpoints.dcp.pieces import tensors_of
from stratagem_checkpoints.distinct import gather_distinct
from stratagem_checkpoints.engine import FolderLayout
from stratagem_checkpoints.mapped_file import SMALL

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: What Lightning's strategies add to a folder.
LIGHTNINGS = "meta.pt"


@define(eq=False, kw_only=True)
class DCPCheckpoint(FolderLayout):
    """Write one folder from all ranks; a reader maps what it uses. See [Note: torch's files and ours]."""

    suffix: ClassVar[str] = ".dcp"
    index, manifest = INDEX, MANIFEST

    def planned(self, state: dict[str, Any], path: Path, run: RunContext) -> _Plan:
        return _Plan(state, path)

    def write_part(self, plan: _Plan, folder: Path, collectives: Collectives) -> dict[str, dict[str, Any]]:
        _save(plan.tensors, folder, collectives)
        return _checksums(folder, f"__{collectives.rank}_")

    def described(self, plan: _Plan, parts: list[dict[str, dict[str, Any]]], folder: Path) -> bytes:
        files = {name: entry for part in parts for name, entry in part.items()}
        return indexes.encoded({"names": plan.names, "state": plan.tree, "files": files}, folder)

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        manifest, index = on_all_ranks(run.collectives, lambda: indexes.read_verified(path, run.rank, run.world_size))
        tensors = tensors_of(path, index, run)
        return on_all_ranks(run.collectives, lambda: _decoded(path, manifest, index, tensors))

    def recognises(self, path: Path) -> bool:
        return not is_remote(path) and (path / INDEX).is_file()

    def verify(self, path: Path) -> bool:
        indexes.read_verified(path)
        return True

    def files_at(self, path: Path) -> set[str]:
        try:
            manifest = indexes.read_manifest(path)
        except CheckpointError:
            manifest = None
        named = [each.name for each in path.glob("__*_*.distcp")] if manifest is None else manifest["files"]
        return {INDEX, MANIFEST, *named}  # without a readable list, those with torch's names

    def remove(self, path: Path) -> None:
        if not self.recognises(path) or not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path} was not written by stratagem", do="delete it yourself; nothing was deleted")
        super().remove(path)


# --- Writing -----------------------------------------------------------------------------------------------------


class _Plan:
    """The tensors of a state by name, and the other values as JSON."""

    def __init__(self, state: Mapping[str, Any], path: Path) -> None:
        if is_remote(path):
            raise CheckpointError(f"{path} is a URL", expected="a local folder, for torch's layout")
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: list[str] = []
        self.tree = encode(dict(state), self._add)

    def _add(self, tensor: torch.Tensor, name: str) -> int:
        self.names.append(name)
        self.tensors[name] = tensor
        return len(self.names) - 1

    def divide(self, collectives: Collectives) -> None:
        """Keep the tensors that this rank writes. Collective."""
        lacks = tuple(name for name in self.tensors if self.tensors[name].is_meta)
        absent = {rank: set(theirs) for rank, theirs in gather_distinct(collectives, lacks)}
        kept = [name for name, tensor in self.tensors.items() if _writes(name, tensor, absent, collectives.rank)]
        self.tensors = {name: self.tensors[name] for name in kept}

    def copy(self, memory: CPUCopies | None) -> CPUCopies:
        """Copy the tensors, so that training may change the originals."""
        copies = memory or CPUCopies()
        self.tensors = {name: _copied(tensor, copies) for name, tensor in self.tensors.items()}
        copies.wait()
        return copies


def _copied(tensor: torch.Tensor, copies: CPUCopies) -> torch.Tensor:
    """Return a copy of `tensor`, or of this rank's shard of it, on the CPU; complete after ``copies.wait()``."""
    if not isinstance(tensor, DTensor):
        return copies.take(tensor)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
    return DTensor(copies.take(tensor.to_local()), spec, requires_grad=False)


def _writes(name: str, tensor: torch.Tensor, absent: Mapping[int, set[str]], rank: int) -> bool:
    """Return whether this rank writes `tensor`. Small ones may differ between ranks, so only one rank writes them."""
    if tensor.is_meta:
        return False
    small = not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= SMALL
    return not small or rank == next(first for first, lacks in absent.items() if name not in lacks)


def _save(tensors: dict[str, torch.Tensor], folder: Path, collectives: Any) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    among = {"no_dist": True} if collectives.world_size == 1 else {"process_group": collectives.group}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a single process without a process group
            dcp.save(tensors, storage_writer=writer, **among)
    except dcp.CheckpointException as error:  # with the errors of all ranks
        first = next(iter(error.failures.values()), (error, None))[0]
        raise first if isinstance(first, OSError) else OSError(str(error)) from error


def _checksums(folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Return size and checksum of each file of this rank."""
    return {path.name: indexes.described(path) for path in folder.glob(f"{prefix}*.distcp")}


# --- Reading -----------------------------------------------------------------------------------------------------


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
            return _of_lightning(tensors, index, path) or _foreign_model(tensors, index, path)
        state: dict[str, Any] = decode(manifest["state"], [tensors[name] for name in manifest["names"]])
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise indexes.unreadable(path, f"{type(error).__name__}: {text[0][:120] if text else ''}") from error
    return state


def _of_lightning(tensors: dict[str, torch.Tensor], index: Metadata, path: Path) -> dict[str, Any] | None:
    """Return the state of a folder that a sharded strategy of Lightning wrote; None for another one."""
    if not ((path / LIGHTNINGS).is_file() and index.planner_data):
        return None
    from stratagem_checkpoints import lightning

    return lightning.state_of_folder(path, index, tensors, one_file.content_of(path / LIGHTNINGS))


def _foreign_model(tensors: dict[str, torch.Tensor], index: Metadata, path: Path) -> dict[str, Any]:
    """Return the model of a folder that another program wrote."""
    outer = {name: keys[0] for name, keys in (index.planner_data or {}).items() if len(keys) > 1}
    for prefix in ("state_dict.", "model.", "module."):
        named = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if named:
            break
    else:  # the model's tensors are not within another mapping, as the optimizer's are
        prefix, named = "", {name: value for name, value in tensors.items() if name not in outer}
    skipped = sorted({*index.state_dict_metadata} - {f"{prefix}{name}" for name in named})
    if skipped:
        shown = ", ".join(skipped[:3]) + (f" and {len(skipped) - 3} more" if len(skipped) > 3 else "")
        warnings.warn(f"{path} was written by another program: only its model is read, not {shown}", stacklevel=2)
    return {"state_dict": named}


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        index = indexes.read_index(Path(self.path))
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        return index
