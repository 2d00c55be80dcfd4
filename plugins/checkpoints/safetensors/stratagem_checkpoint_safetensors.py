"""Save one ``.safetensors`` file, with the tensors of the model under their names, as other libraries expect them.

All other state (optimizers, progress, hyper-parameters) is JSON in the metadata of the file, and its tensors have names
that begin with ``stratagem.``, so a run can resume from the file. A file of another program is read as a model without
other state. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xxhash
from attrs import define, field
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from stratagem.api import CheckpointFormat, hookimpl
from stratagem.api.json_tree import decode, encode
from stratagem.api.paths import is_remote, refusals
from stratagem.checkpoint.cpu_copies import CPUCopies
from stratagem.checkpoint.files import publish_file, remove_file, verify_file
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
    """Write one file on rank 0, which other libraries open; all ranks read it.

    While it is written, its content is in memory twice.
    """

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
                    publish_file(path, lambda file: file.write(content.serialized()), xxhash.xxh3_128)
                except CheckpointError as caught:
                    error = caught
            collectives.fail_together(error)

        run.save_in_background(write, background=self.async_save)
        return True

    @hookimpl
    def load_checkpoint(self, path: Path, into: dict[str, Any] | None, run: RunContext) -> dict[str, Any]:
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

    def serialized(self) -> bytes:
        own: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.tensors.items():
            whole = tensor.cpu().contiguous()
            # The format refuses tensors that share memory.
            own[name] = whole.clone() if whole.untyped_storage().data_ptr() in seen else whole
            seen.add(own[name].untyped_storage().data_ptr())
        return save(own, self.metadata)


def _read(path: Path) -> dict[str, Any]:
    verify_file(path, xxhash.xxh3_128)
    try:
        if is_remote(path):
            with refusals(path, "read"):
                content = path.read_bytes()
            tensors, head = load(content), content[:8]
            header = content[8 : 8 + int.from_bytes(head, "little")]
        else:
            tensors = load_file(path)
            with path.open("rb") as file:
                header = file.read(int.from_bytes(file.read(8), "little"))
        metadata = json.loads(header).get("__metadata__", {})
        if _REST not in metadata:
            return {"state_dict": tensors}
        rest = json.loads(metadata[_REST])
        state: dict[str, Any] = decode(rest["state"], [tensors[name] for name in rest["names"]])
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file ({type(error).__name__}: {error})",
            expected="a file of tensors", do="use another file; no code of this one was executed",
        ) from error  # fmt: skip
    return state
