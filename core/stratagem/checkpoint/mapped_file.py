"""Map parts of a file into memory: pages are read on first use, and are released with the last tensor that uses them.

A mapping covers a segment of neighbouring parts, not the whole file, so that memory becomes free as a state is used.
Writes to the tensors do not change the file.

[Note: mapped tensors]
A format may return tensors that are mapped from its files. Weights are copied into the model, and
`physical_optimizer_state` copies the state of optimizers. `with_own_memory` copies all other tensors, as soon as the
state is read. So nothing refers to the files once a load has returned: they may be overwritten or deleted.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch import nn

#: Bytes after which a segment ends: a process may have 65530 mappings.
SEGMENT: Final = 64 << 20
#: Parts up to this many bytes are read rather than mapped, since a mapping takes at least a page.
SMALL: Final = 1 << 20


def mapped_tensors(path: Path, entries: Sequence[tuple[int, torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
    """Return the contiguous tensors that begin at these offsets of the file at `path`, of these dtypes and shapes.

    Raises:
        OSError: the file cannot be read.
        ValueError: a tensor ends behind the end of the file.
    """
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in entries]
    parts = [(offset, size) for (offset, _, _), size in zip(entries, sizes, strict=True)]
    tensors = []
    for storage, (offset, dtype, shape) in zip(mapped_storages(path, parts), entries, strict=True):
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]
        tensors.append(tensor.clone() if offset % dtype.itemsize else tensor)
    return tensors


def mapped_storages(path: Path, parts: Sequence[tuple[int, int]]) -> list[torch.UntypedStorage]:
    """Return the `parts` of the file at `path`, each an offset and a number of bytes; small ones are copies.

    Raises:
        OSError: the file cannot be read.
        ValueError: a part is not within the file.
    """
    found: dict[int, torch.UntypedStorage] = {}
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        for offset, size in parts:
            if not (offset >= 0 and 0 <= size <= length - offset):
                raise ValueError(f"bytes {offset} to {offset + size} are not within {path}, which has {length}")
        large = sorted((number for number, (_, size) in enumerate(parts) if size > SMALL), key=parts.__getitem__)
        for number in set(range(len(parts))) - set(large):
            found[number] = _read(file.fileno(), *parts[number])
        while large:
            begin = parts[large[0]][0] // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            fitting = [number for number in large if sum(parts[number]) <= begin + SEGMENT] or large[:1]
            end = max(sum(parts[number]) for number in fitting)
            memory = mmap.mmap(file.fileno(), end - begin, access=mmap.ACCESS_COPY, offset=begin)
            segment = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            for number in fitting:
                offset, size = parts[number]
                found[number] = segment[offset - begin : offset - begin + size]
            large = large[len(fitting) :]
    return [found[number] for number in range(len(parts))]


def _read(descriptor: int, offset: int, size: int) -> torch.UntypedStorage:
    if not size:
        return torch.UntypedStorage(0)
    memory, done = bytearray(size), 0
    while done < size and (count := os.preadv(descriptor, [memoryview(memory)[done:]], offset + done)):
        done += count
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


#: What is copied when it is applied.
_APPLIED = ("state_dict", "optimizers")


def with_own_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with copies of all tensors but the model's, the optimizers' and the rows of ranks.

    See [Note: mapped tensors].
    """
    # Of rows of ranks, the few that a rank decodes have their own memory.
    kept = {"ranks", *_APPLIED} if isinstance(state.get("ranks"), torch.Tensor) else _APPLIED
    return {key: value if key in kept else _copied(value) for key, value in state.items()}


def with_own_extras(weights: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return `weights` with copies of the tensors that no parameter or buffer of `module` takes the values of.

    They are the extra state of a part, or a weight in another form, which the part may keep.
    """
    taken: set[str] = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {*part._parameters, *part._buffers} - {*getattr(part, "loads_converted", ())}
        taken |= {f"{prefix}.{name}".removeprefix(".") for name in own}
    extras = {
        name: value.clone()
        for name, value in weights.items()
        if name not in taken and isinstance(value, torch.Tensor) and not value.is_meta
    }
    return {**weights, **extras} if extras else weights  # an engine may have a mapping of its own


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
