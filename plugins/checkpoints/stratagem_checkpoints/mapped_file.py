"""Map parts of a file into memory: pages are read on first use, and are released with the last tensor that uses them.

A mapping covers a segment of neighbouring parts, not the whole file, so that memory becomes free as a state is used.
Writes to the tensors do not change the file. See [Note: mapped tensors] in `stratagem.checkpoint.tensor_memory`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

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
