"""Have the C library return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
#: glibc's default.
_MOST_MAPPED = 65536


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
