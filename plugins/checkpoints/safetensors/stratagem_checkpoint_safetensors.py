"""Save one ``.safetensors`` file, with the tensors of the model under their names, as other libraries expect them.

All other state (optimizers, progress, hyper-parameters) is JSON in the metadata of the file, and its tensors have names
that begin with ``stratagem.``, so a run can resume from the file. A file of another program is read as a model without
other state. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import torch
import xxhash
from attrs import define, field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from stratagem.api import CheckpointFormat, hookimpl
from stratagem.api.json_tree import decode, encode
from stratagem.api.paths import is_remote, refusals
from stratagem.checkpoint.cpu_copies import CPUCopies
from stratagem.checkpoint.files import publish_file, remove_file, verify_file
from stratagem.checkpoint.mapped_file import mapped_tensors
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

_REST, _TENSOR = "stratagem", "stratagem."
#: Exceptions from reading a file that is damaged, or written by another program.
_UNREADABLE = (
    SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError,
)  # fmt: skip
#: The limit of the format, in bytes.
_MAX_HEADER = 100_000_000


@define(eq=False, kw_only=True)
class SafetensorsCheckpoint(CheckpointFormat):
    """Write one file on rank 0, which other libraries open; all ranks read it."""

    #: Write in the background: training waits only until the state is copied.
    async_save: bool = False
    _copies: CPUCopies = field(init=False, factory=CPUCopies)

    suffix: ClassVar[str] = ".safetensors"

    @hookimpl
    def save_checkpoint(self, state: dict[str, Any], path: Path, run: RunContext) -> bool:
        content, error = None, None
        run.wait_for_saves()  # one copy at a time
        if run.is_global_zero:
            try:
                content = _Content(state)
                if self.async_save:
                    content.copy(self._copies)
            except CheckpointError as caught:
                error = caught
        run.collectives.fail_together(error)

        def write(collectives: Collectives) -> None:
            error = None
            if content is not None:
                try:
                    publish_file(path, content.write, xxhash.xxh3_128)
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
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(9)
        return start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= _MAX_HEADER

    def is_whole(self, path: Path) -> bool:
        try:
            # A file of another program has no checksum; that it can be read must be enough.
            return verify_file(path, xxhash.xxh3_128) or bool(_read(path))
        except CheckpointError:
            return False

    def remove(self, path: Path) -> None:
        remove_file(path)


class _Content:
    """The content of a file: tensors by name, each with its own memory, and the other state as text."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: list[str] = []
        tree = encode(dict(state), self._add)
        self.metadata = {"format": "pt", _REST: json.dumps({"names": self.names, "state": tree}, ensure_ascii=False)}

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        number, name = len(self.names), path.removeprefix("state_dict.")
        if name == path or name.startswith(_TENSOR) or name in self.tensors:
            name = f"{_TENSOR}{number}"
        self.names.append(name)
        self.tensors[name] = tensor
        return number

    def copy(self, copies: CPUCopies) -> None:
        """Copy the tensors, so that training may change the originals."""
        self.tensors = {name: copies.take(tensor) for name, tensor in self.tensors.items()}
        copies.wait()

    def write(self, file: BinaryIO) -> None:
        """Write the file, one tensor after the other: each is copied from its device when its turn comes."""
        kinds = {name: _kind(tensor.dtype) for name, tensor in self.tensors.items()}
        # In the order of the library: offsets are then multiples of the size of an element.
        order = sorted(self.tensors, key=lambda name: (-self.tensors[name].dtype.itemsize, name))
        header: dict[str, Any] = {"__metadata__": self.metadata}
        end = 0
        for name in order:
            tensor, (text, per_element) = self.tensors[name], kinds[name]
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
            if self.tensors[name].numel():
                file.write(_bytes(self.tensors[name]))


@functools.cache
def _kind(dtype: torch.dtype) -> tuple[str, int]:
    """Return the format's name of `dtype`, and how many numbers an element is there."""
    try:
        content = save({"x": torch.empty(1, dtype=dtype)})
    except (KeyError, SafetensorError):
        raise CheckpointError(
            f"the checkpoint has a tensor of dtype {dtype}", expected="a dtype of the safetensors format",
            do='convert it in state_dict(), or use checkpoint="full" or "sharded"',
        ) from None  # fmt: skip
    entry = _header(content)["x"]
    return entry["dtype"], entry["shape"][0]


def _header(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def _bytes(tensor: torch.Tensor) -> memoryview:
    whole = tensor.cpu().contiguous()
    array: Any = (ctypes.c_char * (whole.numel() * whole.element_size())).from_address(whole.data_ptr())
    array.keeps = whole  # the memory must outlive the view of it
    return memoryview(array).cast("B")


def _read(path: Path) -> dict[str, Any]:
    verify_file(path, xxhash.xxh3_128)
    try:
        if is_remote(path):
            with refusals(path, "read"):
                content = path.read_bytes()
            tensors, header = load(content), _header(content)
        else:
            tensors, header = _mapped(path)
        metadata = header.get("__metadata__", {})
        if _REST not in metadata:
            return {"state_dict": tensors}
        rest = json.loads(metadata[_REST])
        state: dict[str, Any] = decode(rest["state"], [tensors[name] for name in rest["names"]])
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file ({type(error).__name__}: {error})",
            expected="a file of tensors", do="use another file; no code of this one was executed",
        ) from error  # fmt: skip
    return state


def _mapped(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors by name, mapped from the file, and its header, which the library has checked."""
    with safe_open(path, framework="pt") as checked, path.open("rb") as file:
        start = file.read(8)
        header = _header(start + file.read(int.from_bytes(start, "little")))
        begin, entries = file.tell(), {}
        for name in checked.keys():  # noqa: SIM118 - it is not a mapping
            tensor = checked.get_tensor(name)  # of a mapping of the whole file, which is not read and not kept
            entries[name] = (begin + header[name]["data_offsets"][0], tensor.dtype, tensor.shape)
    return dict(zip(entries, mapped_tensors(path, list(entries.values())), strict=True)), header
