"""Memory of the CPU: reuse that of messages, whose pages the system would zero again; return that of large blocks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator, Sequence

import torch

#: Smaller buffers come from the heap of the C library, which reuses them.
LEAST_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
#: glibc's default.
_MOST_MAPPED = 65536


class BufferPool:
    """Buffers for messages; one is used again when no tensor refers to its memory.

    Args:
        most: of how many buffers the free ones are dropped where none of them fits.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._buffers: list[torch.Tensor] = []

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor; the memory is reused for CPU tensors of a megabyte and more."""
        needed = math.prod(size) * dtype.itemsize
        if not _is_reused(device, needed):
            return torch.empty(*size, dtype=dtype, device=device)
        buffer = self._free(needed)
        if buffer is None:
            buffer = torch.empty(needed, dtype=torch.uint8, device=device)
            self._buffers.append(buffer)
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(buffer.untyped_storage(), 0, tuple(size))  # type: ignore[call-overload]
        return tensor

    def _free(self, needed: int) -> torch.Tensor | None:
        """Return the smallest free buffer of `needed` to twice as many bytes; drop the free ones if none fits."""
        fitting = [each for each in self._buffers if needed <= each.nbytes <= 2 * needed and not _is_in_use(each)]
        if not fitting and len(self._buffers) >= self._most:
            self.drop_free()
        return min(fitting, key=lambda each: each.nbytes, default=None)

    def drop_free(self) -> None:
        """Free the buffers that are not in use."""
        self._buffers = [each for each in self._buffers if _is_in_use(each)]

    def clear(self) -> None:
        """Free the buffers, as soon as they are not in use."""
        self._buffers = []


def is_pooled(tensor: torch.Tensor) -> bool:
    """Whether a pool reuses the memory of tensors as large as `tensor`."""
    return _is_reused(tensor.device, tensor.nbytes)


def _is_reused(device: torch.device, num_bytes: int) -> bool:
    return device.type == "cpu" and num_bytes >= LEAST_BYTES


def _is_in_use(buffer: torch.Tensor) -> bool:
    return _references(buffer) != _ALONE


def _references(buffer: torch.Tensor) -> tuple[int, int]:
    """Return how many tensors, in Python or within torch, and how many names refer to the memory of `buffer`.

    Python has one object for a storage, which counts once within torch whatever refers to it.
    """
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


#: What `_references` returns where nothing else refers to the memory; it depends on the versions of torch and Python.
_ALONE = _references(torch.empty(1))


# --- The C library ---------------------------------------------------------------------------------------------


def return_large_blocks() -> None:
    """Have the C library return blocks of a megabyte to the system as soon as they are free.

    glibc learns from the first large block that is freed to keep blocks of that size. A heap of gathered units, freed
    in between shards that stay, is never returned: four times the memory of the shards, measured.
    """
    _set(_M_MMAP_THRESHOLD, 1 << 20)


@contextlib.contextmanager
def reuse_freed_blocks() -> Iterator[None]:
    """Within, have the C library keep up to 64 MB that are freed for the next blocks, also for large ones.

    An optimizer allocates and frees temporary tensors for each parameter; the system would zero the pages of each.
    """
    _set(_M_TRIM_THRESHOLD, 64 << 20)
    _set(_M_MMAP_MAX, 0)
    try:
        yield
    finally:
        _set(_M_MMAP_MAX, _MOST_MAPPED)


def _set(parameter: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(parameter, value)
