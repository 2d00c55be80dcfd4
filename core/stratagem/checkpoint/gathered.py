"""Tensors that a strategy gathers for a save, which are not copied again.

[Note: gathered tensors]
What a strategy gathers for a save is a copy already. Where it calls `as_gathered`, a background save uses that memory
rather than copy it once more. This holds only for tensors that are made while the state of a save is collected: what
is gathered for another caller belongs to that caller, which may change it during a later save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

_GATHERED = "_stratagem_gathered"
_collecting: ContextVar[bool] = ContextVar("collecting", default=False)


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Within: the state of a save is collected, which nothing but the save uses; see [Note: gathered tensors]."""
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


def as_gathered(tensor: Tensor, part: Tensor | None = None) -> Tensor:
    """Return `tensor`, which was gathered; it is not copied again for a save, unless it shares memory with `part`.

    Args:
        part: what this rank had of it. A tensor that was not divided may have been returned as it is.
    """
    if _collecting.get() and tensor.device.type == "cpu" and not _share_memory(tensor, part):
        setattr(tensor.untyped_storage(), _GATHERED, True)
    return tensor


def _share_memory(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def is_gathered(tensor: Tensor) -> bool:
    """Whether `tensor`, on the CPU, was made for a save alone; see [Note: gathered tensors]."""
    return tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), _GATHERED)
