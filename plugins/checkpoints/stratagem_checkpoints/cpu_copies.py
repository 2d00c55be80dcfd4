"""Copy tensors to the CPU before a background save; training waits for the copies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stratagem.checkpoint.tensor_memory import is_gathered


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
        """Return a copy of `tensor` on the CPU, complete after `wait`; itself if it was gathered for this save."""
        if is_gathered(tensor):
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
