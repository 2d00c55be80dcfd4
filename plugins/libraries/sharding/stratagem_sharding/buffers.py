"""Reuse the memory of messages on the CPU, whose pages the system would zero again for each message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

#: Smaller buffers come from the heap of the C library, which reuses them.
LEAST_BYTES = 1 << 20


class BufferPool:
    """Buffers for messages; one is used again when no tensor refers to its memory.

    Args:
        most: of how many buffers the free ones are dropped where none of them fits.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._storages: list[torch.UntypedStorage] = []

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor; the memory is reused for CPU tensors of a megabyte and more."""
        needed = math.prod(size) * dtype.itemsize
        if device.type != "cpu" or needed < LEAST_BYTES:
            return torch.empty(*size, dtype=dtype, device=device)
        storage = self._free(needed)
        if storage is None:
            storage = torch.empty(needed, dtype=torch.uint8, device=device).untyped_storage()
            self._storages.append(storage)
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, 0, tuple(size))  # type: ignore[call-overload]
        return tensor

    def _free(self, needed: int) -> torch.UntypedStorage | None:
        """Return the smallest free storage of `needed` to twice as many bytes; drop the free ones if none fits."""
        free = [each for each in self._storages if not _is_in_use(each)]
        fitting = [each for each in free if needed <= each.nbytes() <= 2 * needed]
        if not fitting and len(self._storages) >= self._most:
            self.drop_free()
        return min(fitting, key=torch.UntypedStorage.nbytes, default=None)

    def drop_free(self) -> None:
        """Free the buffers that are not in use."""
        self._storages = [each for each in self._storages if _is_in_use(each)]

    def clear(self) -> None:
        """Free the buffers, as soon as they are not in use."""
        self._storages = []


def is_pooled(tensor: torch.Tensor) -> bool:
    """Whether a pool reuses the memory of tensors as large as `tensor`."""
    return tensor.device.type == "cpu" and tensor.nbytes >= LEAST_BYTES


def _is_in_use(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor refers to `storage`, in Python or within torch; the pool's own reference is one."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 1
