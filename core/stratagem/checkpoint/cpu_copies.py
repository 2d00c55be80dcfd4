"""Copy tensors to the CPU before a background save; training waits for the copies.

[Note: gathered tensors]
What a strategy gathers for a save is a copy already. Where it calls `as_gathered`, a background save uses that memory
rather than copy it once more. This holds only for tensors that are made while the state of a save is collected: what
is gathered for another caller belongs to that caller, which may change it during a later save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch
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


def is_pinnable(tensor: Tensor) -> bool:
    """Whether `tensor` can be copied to pinned memory asynchronously."""
    return bool(tensor.is_cuda)


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until all copies that were queued on `devices` are done."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


class CPUCopies:
    """Copies tensors to the CPU; CUDA tensors are copied asynchronously, into pinned memory that is reused.

    Pinning memory takes longer than copying, so the next save uses the same memory. It must begin only when the copies
    of this save are no longer read.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._devices: set[torch.device] = set()

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` on the CPU, which is complete after `wait`; see [Note: gathered tensors]."""
        if tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), _GATHERED):
            return tensor
        if not is_pinnable(tensor):
            return tensor.to("cpu", copy=True)
        index = len(self._taken)
        copy = self._kept[index] if index < len(self._kept) else None
        if copy is None or (copy.shape, copy.stride(), copy.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._taken.append(copy.copy_(tensor, non_blocking=True))
        self._devices.add(tensor.device)
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete; later calls of `take` belong to the next save."""
        wait_for(self._devices)
        self._kept, self._taken, self._devices = self._taken, [], set()
