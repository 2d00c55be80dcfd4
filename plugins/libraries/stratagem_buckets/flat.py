"""Flat buckets: group parameters, average their gradients in one message each, and take the result apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem_buckets import Bucket

if TYPE_CHECKING:
    from stratagem.api.world import Collectives


def grouped(
    parameters: Iterable[nn.Parameter], limit: float, part: Callable[[Tensor], Tensor] = torch.detach
) -> list[list[nn.Parameter]]:
    """Return `parameters` in buckets of one dtype and device, of at most `limit` bytes each, or one parameter.

    Args:
        part: returns what this rank has of a parameter.
    """
    groups: list[list[nn.Parameter]] = []
    opened: dict[Any, tuple[list[nn.Parameter], float]] = {}
    for parameter in parameters:
        own = part(parameter)
        group, left = opened.get((own.dtype, own.device), ([], 0.0))
        if left < own.nbytes or not group:
            group, left = [], limit
            groups.append(group)
        group.append(parameter)
        opened[own.dtype, own.device] = group, left - own.nbytes
    return groups


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return a flat copy of `tensors`, which have one dtype, to be sent in one message."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat`, with the shapes of `like`."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def averaged(
    flat: Tensor, index: int, groups: Sequence[Sequence[nn.Parameter]], like: Sequence[Tensor], over: Collectives,
    reduce: Callable[[Bucket], torch.futures.Future[Tensor]] | None,
) -> torch.futures.Future[Tensor]:  # fmt: skip
    """Begin to average the gradients of bucket `index` of `groups` over the ranks, through the comm hooks if any.

    Args:
        flat: the gradients.
        like: what has the shape of each of them.
        reduce: what `bucket_reducer` returned.
    """
    if reduce is None:
        with over.traffic.sent_by("gradients"):
            return over.average_async(flat)
    parameters, gradients = tuple(groups[index]), tuple(views(flat, like))
    last = index == len(groups) - 1
    return reduce(Bucket(buffer=flat, index=index, is_last=last, parameters=parameters, gradients=gradients))


def reached(here: Sequence[bool], over: Collectives) -> list[bool]:
    """Return each flag after a logical or over the ranks. Collective."""
    flags = torch.tensor(here, dtype=torch.uint8)  # on the CPU: no wait for a GPU
    return over.unchecked.all_reduce(flags, "max").bool().tolist() if here else []
