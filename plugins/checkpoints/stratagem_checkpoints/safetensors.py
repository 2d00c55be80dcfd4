"""Save one ``.safetensors`` file, with the tensors of the model under their names, as other libraries expect them.

All other state (optimizers, progress, hyper-parameters) is JSON in the metadata of the file, and its tensors have names
that begin with ``stratagem.``, so a run can resume from the file. A file of another program is read as a model without
other state, and so is a folder of Hugging Face: one such file, or several with an index.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from attrs import define

from stratagem.api.json_tree import decode, encode
from stratagem.api.paths import is_remote, refusals
from stratagem.errors import CheckpointError, ConfigError
from stratagem_checkpoints.engine import Copy, FileLayout, Writer, unreadable
from stratagem_checkpoints.mapped_file import mapped_tensors
from stratagem_checkpoints.raw_bytes import bytes_of

_REST, _TENSOR = "stratagem", "stratagem."
#: Hugging Face's names of a folder's only file, and of the index of several.
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: The limit of the format, in bytes.
_MAX_HEADER = 100_000_000


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            f"the format safetensors needs the library of that name ({error})",
            do='run `pip install "stratagem-checkpoints[safetensors]"`',
        ) from None
    return safetensors


_safetensors = _library()  # without it, the format cannot be chosen
#: Exceptions from reading a file that is damaged, or written by another program.
_UNREADABLE = (
    _safetensors.SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError,
)  # fmt: skip


@define(eq=False, kw_only=True)
class SafetensorsCheckpoint(FileLayout):
    """Write one file on rank 0, which other libraries open; all ranks read it."""

    suffix: ClassVar[str] = ".safetensors"

    def content(self, state: dict[str, Any], copy: Copy | None) -> Writer:
        tensors: dict[str, torch.Tensor] = {}
        names: list[str] = []

        def add(tensor: torch.Tensor, path: str) -> int:
            number, name = len(names), path.removeprefix("state_dict.")
            if name == path or name.startswith(_TENSOR) or name in tensors:
                name = f"{_TENSOR}{number}"
            names.append(name)
            tensors[name] = copy(tensor) if copy else tensor
            return number

        rest = {"names": names, "state": encode(dict(state), add)}
        metadata = {"format": "pt", _REST: json.dumps(rest, ensure_ascii=False)}
        return functools.partial(_write, tensors, metadata)

    def recognises(self, path: Path) -> bool:
        if not path.is_file():
            return _is_folder(path) and any((path / name).is_file() for name in (_ONE, _INDEX))
        with path.open("rb") as file:
            start = file.read(9)
        return start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= _MAX_HEADER

    def saved_at(self, path: Path) -> float:
        return 0.0 if _is_folder(path) else super().saved_at(path)  # never the newest: a run cannot resume from it

    def verify_sum(self, path: Path) -> bool:
        return not _is_folder(path) and super().verify_sum(path)

    def state_in(self, path: Path) -> dict[str, Any]:
        if _is_folder(path):
            return {"state_dict": _of_several(path)}
        try:
            if is_remote(path):
                with refusals(path, "read"):
                    content = path.read_bytes()
                tensors, header = _safetensors.torch.load(content), _header(content)
            else:
                tensors, header = _mapped(path)
            metadata = header.get("__metadata__", {})
            if _REST not in metadata:
                return {"state_dict": tensors}
            rest = json.loads(metadata[_REST])
            state: dict[str, Any] = decode(rest["state"], [tensors[name] for name in rest["names"]])
        except _UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}"
            raise unreadable(path, "a safetensors file", reason, "a file of tensors", "file") from error
        return state


def _is_folder(path: Path) -> bool:
    return not is_remote(path) and path.is_dir()


def _of_several(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder of Hugging Face."""
    try:
        if not (path / _INDEX).is_file():
            return _mapped(path / _ONE)[0]
        files: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        if outside := [name for name in files.values() if Path(name).name != name]:
            raise ValueError(f"it names {outside[0]!r}, which is not a file in this folder")
        parts = {name: _mapped(path / name)[0] for name in dict.fromkeys(files.values())}
        return {name: parts[file][name] for name, file in files.items()}
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise unreadable(path, "a folder of safetensors files", reason, "the files that its index names") from error


def _write(tensors: dict[str, torch.Tensor], metadata: dict[str, str], file: BinaryIO) -> None:
    """Write the file, one tensor after the other: each is copied from its device when its turn comes."""
    kinds = {name: _kind(tensor.dtype) for name, tensor in tensors.items()}
    # In the order of the library: offsets are then multiples of the size of an element.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        tensor, (text, per_element) = tensors[name], kinds[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = [*tensor.shape[:-1], *(length * per_element for length in tensor.shape[-1:])]
        header[name] = {"dtype": text, "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > _MAX_HEADER:
        raise CheckpointError(
            f"the names and values of the checkpoint take {len(head)} bytes", expected=f"at most {_MAX_HEADER}",
            do='use checkpoint="full" or "sharded"',
        )  # fmt: skip
    file.write(len(head).to_bytes(8, "little") + head)
    for name in order:
        if tensors[name].numel():
            file.write(bytes_of(tensors[name]))


@functools.cache
def _kind(dtype: torch.dtype) -> tuple[str, int]:
    """Return the format's name of `dtype`, and how many numbers an element is there."""
    try:
        content = _safetensors.torch.save({"x": torch.empty(1, dtype=dtype)})
    except (KeyError, _safetensors.SafetensorError):
        raise CheckpointError(
            f"the checkpoint has a tensor of dtype {dtype}", expected="a dtype of the safetensors format",
            do='convert it in state_dict(), or use checkpoint="full" or "sharded"',
        ) from None  # fmt: skip
    entry = _header(content)["x"]
    return entry["dtype"], entry["shape"][0]


def _header(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def _mapped(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors by name, mapped from the file, and its header, which the library has checked."""
    with _safetensors.safe_open(path, framework="pt") as checked, path.open("rb") as file:
        start = file.read(8)
        header = _header(start + file.read(int.from_bytes(start, "little")))
        begin, entries = file.tell(), {}
        for name in checked.keys():  # noqa: SIM118 - it is not a mapping
            tensor = checked.get_tensor(name)  # of a mapping of the whole file, which is not read and not kept
            entries[name] = (begin + header[name]["data_offsets"][0], tensor.dtype, tensor.shape)
    return dict(zip(entries, mapped_tensors(path, list(entries.values())), strict=True)), header
