"""Copies of tensors on the CPU, taken while training waits: for saves in the background."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_pinnable(tensor: Tensor) -> bool:
    """Whether a copy of `tensor` to the CPU goes to pinned memory without the CPU waiting for it."""
    return bool(tensor.is_cuda)


def wait_for(devices: Iterable[torch.device]) -> None:
    """Return once all copies that were queued on `devices` are done."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


class CPUCopies:
    """Takes copies of many tensors; those of CUDA tensors are queued, into pinned memory that is kept.

    Pinning takes longer than copying, so the memory is used again for the next round of tensors, which must begin only
    when the copies of this one are no longer read.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._devices: set[torch.device] = set()

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` on the CPU, which holds its values once `wait` has returned."""
        if not is_pinnable(tensor):
            return tensor.to("cpu", copy=True)
        place = len(self._taken)
        copy = self._kept[place] if place < len(self._kept) else None
        if copy is None or (copy.shape, copy.stride(), copy.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._taken.append(copy.copy_(tensor, non_blocking=True))
        self._devices.add(tensor.device)
        return copy

    def wait(self) -> None:
        """Return once all copies hold their values: the end of a round."""
        wait_for(self._devices)
        self._kept, self._taken, self._devices = self._taken, [], set()
