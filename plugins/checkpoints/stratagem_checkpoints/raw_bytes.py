"""Bytes: of a tensor, of a part of a file or object, of an entry in a zip file, of a text with its checksum."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

_CHUNK = 4 << 20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of `tensor` in row-major order; copied only if it is on a device or not contiguous."""
    whole = tensor.cpu().contiguous()
    array: Any = (ctypes.c_char * (whole.numel() * whole.element_size())).from_address(whole.data_ptr())
    array.keeps = whole  # the memory must outlive the view of it
    return memoryview(array).cast("B")


def read_range(path: Any, begin: int, size: int) -> bytes:
    """Return `size` bytes of the object at `path`."""
    data: bytes = path.fs.cat_file(path.path, start=begin, end=begin + size)
    return data


def size_of(path: Any) -> int:
    """Return how many bytes are at `path`, asking the store rather than a cache of it."""
    path.fs.invalidate_cache()
    return int(path.fs.info(path.path)["size"])


def chunks(path: Path, begin: int, size: int) -> Iterator[memoryview]:
    """Yield `size` bytes of a local file, fewer if it ends before; each chunk is valid only until the next."""
    buffer = memoryview(bytearray(min(_CHUNK, size)))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while size and (count := file.readinto(buffer[:size])):
            yield buffer[:count]
            size -= count


def checksum(path: Path, begin: int, size: int) -> str:
    """Return the checksum of `size` bytes of a local file."""
    hasher = xxhash.xxh3_128()
    for content in chunks(path, begin, size):
        hasher.update(content)
    return hasher.hexdigest()


def opened(path: Path) -> BinaryIO:
    """Open an existing file for `write_at`."""
    return open(os.open(path, os.O_WRONLY), "wb", buffering=0)


def write_at(file: BinaryIO, offset: int, content: memoryview) -> None:
    """Write `content` at `offset` of a file, which other threads and processes write as well."""
    done = 0
    while done < len(content):
        done += os.pwrite(file.fileno(), content[done:], offset + done)


def begin_of_entry(file: BinaryIO, header: int) -> int:
    """Return where the content of the entry of a zip file begins whose local header is at `header`."""
    file.seek(header)
    fixed = file.read(30)
    name, extra = (int.from_bytes(fixed[at : at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


def sealed(content: dict[str, Any]) -> bytes:
    """Return `content` as a text with its checksum."""
    text = json.dumps(content, ensure_ascii=False).encode()
    return text + f"\n{xxhash.xxh3_128_hexdigest(text)}\n".encode()


def unsealed(sealed: bytes) -> bytes | None:
    """Return the text of what `sealed` returned; None if its checksum differs."""
    text, _, digest = sealed.partition(b"\n")
    return text if xxhash.xxh3_128_hexdigest(text).encode() == digest.strip() else None
