"""Save everything in one file for ``torch.load(path, weights_only=True)``, with a checksum file next to it."""

from __future__ import annotations

import functools
import io
import operator
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import define

from stratagem.api.json_tree import PLAIN, as_plain, refusal
from stratagem.api.paths import is_remote, refusals
from stratagem.checkpoint.files import sidecar
from stratagem.errors import CheckpointError
from stratagem_checkpoints.engine import Copy, FileLayout, Writer, unreadable
from stratagem_checkpoints.mapped_file import mapped_storages
from stratagem_checkpoints.raw_bytes import begin_of_entry

#: Types of keys that torch's weights-only loader accepts without an allow-list.
_KEYS = (*PLAIN, torch.Size)


@define(eq=False, kw_only=True)
class FullCheckpoint(FileLayout):
    """Write one file on rank 0, which ``torch.load`` opens; all ranks read it."""

    suffix: ClassVar[str] = ".ckpt"

    def content(self, state: dict[str, Any], copy: Copy | None) -> Writer:
        return functools.partial(torch.save, _loadable(state, copy or operator.methodcaller("cpu")))

    def recognises(self, path: Path) -> bool:
        if is_remote(path):
            with path.open("rb") if path.is_file() else io.BytesIO() as file:
                return file.read(4) == b"PK\x03\x04"
        return path.is_file() and _is_of_torch(path)

    def is_readable(self, path: Path) -> bool:
        return self.recognises(path)  # the zip directory at its end must be enough

    def state_in(self, path: Path) -> dict[str, Any]:
        state = content_of(path)
        if isinstance(state, dict) and state and all(isinstance(value, torch.Tensor) for value in state.values()):
            return {"state_dict": dict(state)}  # written by torch.save(model.state_dict())
        if not (isinstance(state, dict) and isinstance(state.get("state_dict"), dict)):
            raise CheckpointError(
                f"{path} holds a {type(state).__name__} without a model", expected='a dict with a "state_dict"'
            )
        return state


def content_of(path: Path) -> Any:
    """Return what `torch.save` wrote to `path`, its tensors mapped if they can be.

    Raises:
        CheckpointError: it is damaged, or holds more than tensors and plain values.
    """
    try:
        state = _mapped(path)
        return torch.load(_source(path), map_location="cpu", weights_only=True) if state is None else state
    except CheckpointError:
        raise
    except Exception as error:
        state = _of_lightning(path)
        if state is None:
            expected = "a file of tensors and plain values"
            raise unreadable(path, "a checkpoint", _first_line(error), expected, "file") from error
        return state


def _is_of_torch(path: Path) -> bool:
    """Return whether torch.save wrote the zip file at `path`, damaged or not; other zip files are not checkpoints."""
    if not zipfile.is_zipfile(path):
        return False
    if sidecar(path).exists():
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except Exception:  # noqa: BLE001 - a damaged directory raises many types
        return True


def _source(path: Path) -> Any:
    if not is_remote(path):
        return path
    with refusals(path, "read"):
        return io.BytesIO(path.read_bytes())


def _mapped(path: Path) -> Any:
    """Return the content of a file of `torch.save` with its tensors mapped; None if this one cannot be mapped.

    torch maps the file as a whole, which would stay in memory until the last tensor is gone. So its storages, which
    are not read here, are replaced by those of `mapped_storages`, which has a mapping for every few of them.
    """
    parts = [] if is_remote(path) else _records(path)
    if not parts:
        return None
    storages, bases = mapped_storages(path, parts), set()
    left = iter(zip(parts, storages, strict=True))

    def replaced(storage: Any, _: str) -> Any:
        (offset, size), own = next(left, ((-1, -1), storage))
        if size != storage.nbytes():
            raise _OtherOrder
        if size:
            bases.add(storage.data_ptr() - offset)
        return own

    try:
        state = torch.load(path, map_location=replaced, weights_only=True, mmap=True)
    except _OtherOrder:
        return None
    return state if len(bases) <= 1 else None


class _OtherOrder(Exception):
    """The storages of a file are not in the order of their numbers."""


def _records(path: Path) -> list[tuple[int, int]]:
    """Return offset and size of each storage in a file of `torch.save`, by number; [] if it is in another form."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        found: dict[int, tuple[int, int]] = {}
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/data/")
            if not (folder and number.isdecimal() and info.compress_type == zipfile.ZIP_STORED):
                continue
            found[int(number)] = (begin_of_entry(file, info.header_offset), info.file_size)
    return [found[number] for number in range(len(found))] if set(found) == set(range(len(found))) else []


def _of_lightning(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that torch refuses, if Lightning wrote it."""
    if is_remote(path):
        return None
    from stratagem_checkpoints import lightning

    try:
        return lightning.read(path)
    except Exception:  # noqa: BLE001 - the first error tells more
        return None


def _first_line(error: Exception) -> str:
    """Return the reason, without torch's advice to load the file unsafely."""
    text = str(error).strip().splitlines()
    advises = not text or "weights_only" in text[0] or "Weights only" in text[0]
    return "not plain data" if advises else f"{type(error).__name__}: {text[0][:120]}"


def _loadable(value: Any, on_cpu: Copy, path: str = "") -> Any:
    """Return `value` in types that the weights-only loader accepts, small views of large tensors copied.

    Tensors are moved to the CPU: a file of CUDA tensors could not be read on a machine without a GPU. Plain values in
    a container are not looked at one by one: a random state has hundreds.

    Raises:
        CheckpointError: a value has another type; names its key.
    """
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        is_view = detached.untyped_storage().nbytes() > detached.numel() * detached.element_size()
        return detached.to("cpu", copy=True) if is_view else on_cpu(detached)
    if isinstance(value, Mapping):
        for key in (key for key in value if not isinstance(key, _KEYS)):
            raise refusal(key, f"a key of {path or 'the checkpoint'}")
        inner = f"{path}." if path else ""
        return {k: v if type(v) in PLAIN else _loadable(v, on_cpu, f"{inner}{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [v if type(v) in PLAIN else _loadable(v, on_cpu, f"{path}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return as_plain(value, path)
