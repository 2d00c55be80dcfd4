"""Communicate many tensors in a few flat messages, since each message costs a latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.api import Collectives
from stratagem_buckets.flat import views

#: Bytes of a message: large compared with the cost of its latency, small compared with the memory of a model.
MESSAGE_BYTES = 25 << 20
#: The sender under which `traffic` counts the bytes.
SENDER = "models"

Average = Callable[[Tensor, Collectives], Tensor]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a (sharded) tensor, detached and sharing its memory; complex numbers as real ones."""
    part: Any = tensor
    part = (part.to_local() if hasattr(part, "to_local") else part).detach()
    return torch.view_as_real(part) if part.is_complex() else part


def is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def group_into_messages(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of `tensors` that share a message: one dtype, and `MESSAGE_BYTES` or a single larger tensor.

    Ranks with tensors of the same shapes get the same messages. Empty tensors are left out.
    """
    open_messages: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        dtype = tensor.dtype
        if dtype in open_messages and sizes[dtype] + tensor.nbytes > MESSAGE_BYTES:
            yield open_messages.pop(dtype)
        if dtype not in open_messages:
            open_messages[dtype], sizes[dtype] = [], 0
        open_messages[dtype].append(name)
        sizes[dtype] += tensor.nbytes
    yield from open_messages.values()


def flatten(tensors: Mapping[str, Tensor], names: list[str], device: torch.device) -> Tensor:
    """Return the named tensors concatenated into a new 1-D tensor on `device`."""
    return torch.cat([tensors[name].reshape(-1).to(device) for name in names])


def unflatten(message: Tensor, tensors: Mapping[str, Tensor], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of `message` with the names and shapes of the tensors that were concatenated."""
    yield from zip(names, views(message, [tensors[name] for name in names]), strict=True)


def plain_mean(message: Tensor, group: Collectives) -> Tensor:
    """Return the average of `message` over `group`; overwrites `message`."""
    return group.average_async(message).wait()


def mean_where_different(message: Tensor, group: Collectives) -> Tensor:
    """Return the average of `message` over `group`; elements that are equal on all ranks stay unchanged to the bit.

    The mean of three equal numbers, rounded, need not be that number.
    """
    low, high = group.all_reduce(message, "min"), group.all_reduce(message, "max")
    return torch.where(low == high, message, group.all_reduce(message, "mean"))


def averages(
    tensors: Mapping[str, Tensor], group: Collectives, device: torch.device, average: Average = plain_mean
) -> Iterator[tuple[str, Tensor]]:
    """Yield the `average` of each tensor over `group`; one message is in memory at a time. Collective."""
    for names in group_into_messages(tensors):
        message = flatten(tensors, names, device)
        with group.traffic.sent_by(SENDER):
            message = average(message, group)
        yield from unflatten(message, tensors, names)


def average_in_place(
    tensors: Mapping[str, Tensor], group: Collectives, device: torch.device, average: Average = plain_mean
) -> None:
    """Overwrite each of `tensors` with its `average` over `group`. Collective."""
    for name, mean in averages(tensors, group, device, average):
        tensors[name].copy_(mean)


def broadcast_from_first(
    tensors: Mapping[str, Tensor], group: Collectives, device: torch.device, sender: str = SENDER
) -> None:
    """Overwrite `tensors` with those of the first rank of `group`. Collective."""
    for names in group_into_messages(tensors):
        message = flatten(tensors, names, device)
        with group.traffic.sent_by(sender):
            group.broadcast(message)
        for name, piece in unflatten(message, tensors, names):
            tensors[name].copy_(piece)
