"""Save everything in one file for ``torch.load(path, weights_only=True)``, with a checksum file next to it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xxhash
from attrs import define, field

from stratagem.api import CheckpointFormat, hookimpl
from stratagem.api.paths import is_remote, refusals
from stratagem.checkpoint.cpu_copies import CPUCopies
from stratagem.checkpoint.files import publish_file, remove_file, sidecar, verify_file
from stratagem.checkpoint.mapped_file import mapped_storages
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

#: Types that torch's weights-only loader accepts without an allow-list.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@define(eq=False, kw_only=True)
class FullCheckpoint(CheckpointFormat):
    """Write one file on rank 0, which ``torch.load`` opens; all ranks read it."""

    #: Write in the background: training waits only until the state is copied.
    async_save: bool = False
    _copies: CPUCopies = field(init=False, factory=CPUCopies)

    suffix: ClassVar[str] = ".ckpt"

    @hookimpl
    def save_checkpoint(self, state: dict[str, Any], path: Path, run: RunContext) -> bool:
        plain, error = None, None
        run.wait_for_saves()  # one copy at a time
        if run.is_global_zero:
            try:
                plain = _loadable(state, self._copies.take if self.async_save else _on_cpu)
            except CheckpointError as caught:
                error = caught
            self._copies.wait()
        run.collectives.fail_together(error)

        def write(collectives: Collectives) -> None:
            error = None
            if plain is not None:
                try:
                    publish_file(path, lambda file: torch.save(plain, file), xxhash.xxh3_128)
                except CheckpointError as caught:
                    error = caught
            collectives.fail_together(error)

        run.save_in_background(write, background=self.async_save)
        return True

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        state: dict[str, Any] = {}
        error = None
        try:
            state = _read(path)
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        return state

    @hookimpl
    def teardown(self) -> None:
        self._copies = CPUCopies()

    def recognises(self, path: Path) -> bool:
        if is_remote(path):
            with path.open("rb") if path.is_file() else io.BytesIO() as file:
                return file.read(4) == b"PK\x03\x04"
        return path.is_file() and _is_of_torch(path)

    def is_whole(self, path: Path) -> bool:
        try:
            # A file that another program wrote has no checksum; the zip directory at its end must be enough.
            return verify_file(path, xxhash.xxh3_128) or self.recognises(path)
        except CheckpointError:
            return False

    def remove(self, path: Path) -> None:
        remove_file(path)


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


def _read(path: Path) -> dict[str, Any]:
    verify_file(path, xxhash.xxh3_128)
    try:
        state = _mapped(path)
        if state is None:
            state = torch.load(_source(path), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({_first_line(error)})",
            expected="a file of tensors and plain values",
            do="use another file; no code of this one was executed",
        ) from error
    if isinstance(state, dict) and state and all(isinstance(value, torch.Tensor) for value in state.values()):
        return {"state_dict": dict(state)}  # written by torch.save(model.state_dict())
    if not (isinstance(state, dict) and isinstance(state.get("state_dict"), dict)):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__} without a model", expected='a dict with a "state_dict"'
        )
    return state


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
            file.seek(info.header_offset)
            header = file.read(30)
            name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            found[int(number)] = (info.header_offset + 30 + name + extra, info.file_size)
    return [found[number] for number in range(len(found))] if set(found) == set(range(len(found))) else []


def _first_line(error: Exception) -> str:
    """Return the reason, without torch's advice to load the file unsafely."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text and "weights_only" not in text[0] else "not plain data"


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


def _loadable(value: Any, on_cpu: Callable[[torch.Tensor], torch.Tensor], path: str = "") -> Any:
    """Return `value` in types that the weights-only loader accepts, small views of large tensors copied.

    Tensors are moved to the CPU: a file of CUDA tensors could not be read on a machine without a GPU.

    Raises:
        CheckpointError: a value has another type; names its key.
    """
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        is_view = detached.untyped_storage().nbytes() > detached.numel() * detached.element_size()
        return detached.to("cpu", copy=True) if is_view else on_cpu(detached)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _PLAIN):
                raise _not_loadable(f"a key of {path or 'the checkpoint'}", key)
        return {key: _loadable(item, on_cpu, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_loadable(item, on_cpu, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str | int | float):  # enumerations and numpy scalars that are numbers too
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise _not_loadable(path, value)


def _not_loadable(path: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {type(value).__name__}",
        expected="tensors, numbers, strings and containers of them: all that can be loaded safely",
        do="convert it in state_dict() or on_save_checkpoint()",
    )
