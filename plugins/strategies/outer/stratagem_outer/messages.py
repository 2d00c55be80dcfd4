"""Many tensors in a few flat messages: each message costs a latency, and a model has hundreds of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.api import Collectives

#: Bytes of a message: enough that its latency does not count, and little enough that a copy of it does not either.
MESSAGE_BYTES = 25 << 20
#: What `traffic` calls the sender.
SENDER = "models"

Average = Callable[[Tensor, Collectives], Tensor]


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a (sharded) tensor, in its memory, as real numbers without a gradient."""
    part: Any = tensor
    part = (part.to_local() if hasattr(part, "to_local") else part).detach()
    return torch.view_as_real(part) if part.is_complex() else part


def in_messages(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of `tensors` that share a message: one dtype, and `MESSAGE_BYTES` or a single larger tensor.

    Ranks that hold the same shapes get the same messages. Nobody sends what is empty.
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


def flat(tensors: Mapping[str, Tensor], names: list[str], device: torch.device) -> Tensor:
    """Return a message of the named tensors, on `device`, in memory of its own: 1-D."""
    return torch.cat([tensors[name].reshape(-1).to(device) for name in names])


def pieces(message: Tensor, tensors: Mapping[str, Tensor], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of `message`, shaped like the named tensors that it was made of."""
    parts = message.split([tensors[name].numel() for name in names])
    for name, part in zip(names, parts, strict=True):
        yield name, part.view(tensors[name].shape)


def plain_mean(message: Tensor, across: Collectives) -> Tensor:
    """Return the average of `message`, in its place."""
    return across.average_async(message).wait()


def mean_where_different(message: Tensor, across: Collectives) -> Tensor:
    """Return the average of `message`, whose elements stay as they are, to the bit, where they are the same everywhere.

    So a constant stays one: a third of a number, three times, need not be that number.
    """
    low, high = across.all_reduce(message, "min"), across.all_reduce(message, "max")
    return torch.where(low == high, message, across.all_reduce(message, "mean"))


def means(
    tensors: Mapping[str, Tensor], across: Collectives, device: torch.device, average: Average = plain_mean
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `average` makes of each of `tensors`, message by message: one of them is in memory at a time."""
    for names in in_messages(tensors):
        message = flat(tensors, names, device)
        with across.traffic.sent_by(SENDER):
            message = average(message, across)
        yield from pieces(message, tensors, names)


def follow_first(tensors: Mapping[str, Tensor], across: Collectives, device: torch.device) -> None:
    """Overwrite `tensors` with those of the first rank of `across`."""
    for names in in_messages(tensors):
        message = flat(tensors, names, device)
        with across.traffic.sent_by(SENDER):
            across.broadcast(message)
        for name, piece in pieces(message, tensors, names):
            tensors[name].copy_(piece)
