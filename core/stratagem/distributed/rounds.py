"""Collectives of small CPU tensors in log2(n) rounds, over gloo, which sends them around a ring of n ranks.

[Note: rounds]
Ranks that exchange a few bytes wait for hops, not for bytes. gloo's all-reduce takes 2(n - 1) hops, its all-gather
n - 1: 2,046 of 1,024 ranks. Here a rank sends to the rank at a distance of 1, 2, 4 ... in one round each, 10 of 1,024
ranks (Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes of what a rank gets, above which a ring is faster.
LARGEST = 2**18
#: Tag of these messages: others between two ranks may go over the same group meanwhile.
_TAG = 0x7368


def all_reduce(
    tensor: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], group: Any
) -> torch.Tensor:
    """Return `tensor` of all ranks combined by a function that may get a rank's twice, such as ``torch.maximum``."""
    distances = _distances(group)
    arriving = [_receive(torch.empty_like(tensor), -distance, group) for distance in distances]
    for distance, (received, arrival) in zip(distances, arriving, strict=True):
        _send(tensor, distance, group, arrival)
        tensor = combine(tensor, received)
    return tensor


def all_gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return every rank's `tensor`, in rank order."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = tensor.new_empty(size, *tensor.shape)  # of this rank, then of the ranks after it
    parts[0] = tensor
    distances = _distances(group)
    arriving = [_receive(parts[distance : 2 * distance], distance, group) for distance in distances]
    for distance, (received, arrival) in zip(distances, arriving, strict=True):
        _send(parts[: len(received)], -distance, group, arrival)
    return list(parts.roll(rank, 0).unbind())


def _distances(group: Any) -> list[int]:
    return [2**power for power in range((dist.get_world_size(group) - 1).bit_length())]


def _receive(buffer: torch.Tensor, distance: int, group: Any) -> tuple[torch.Tensor, Any]:
    """Begin to receive from the rank at a distance: its gloo may send as soon as it has what to send."""
    source = (dist.get_rank(group) + distance) % dist.get_world_size(group)
    return buffer, dist.irecv(buffer, group=group, group_src=source, tag=_TAG)


def _send(tensor: torch.Tensor, distance: int, group: Any, arrival: Any) -> None:
    """Send to the rank at a distance, and wait for that and for what arrives meanwhile."""
    to = (dist.get_rank(group) + distance) % dist.get_world_size(group)
    sent: Any = dist.isend(tensor, group=group, group_dst=to, tag=_TAG)
    arrival.wait()
    sent.wait()
