"""Have the C library return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Have the C library return blocks of a megabyte to the system as soon as they are free.

    glibc learns from the first large block that is freed to keep blocks of that size. A heap of gathered units, freed
    in between shards that stay, is never returned: four times the memory of the shards, measured.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
