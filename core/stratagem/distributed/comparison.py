"""Check that all ranks make the same call.

[Note: comparing calls]
Two ranks that make different calls would mix their values, wait until the timeout, or abort (gloo, for different
sizes). So all ranks first compare a fingerprint h of what they are about to call, over a separate gloo group: the
largest h and the largest -h of all ranks tell whether all are equal.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stratagem.distributed.call_site import where
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

#: By default group: the group over which the runs of this process compare calls.
_comparing: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def fingerprint(text: str) -> int:
    """Return 62 bits of a hash of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def comparing_group(timeout: timedelta) -> Any:
    """Return the group of all ranks over which they compare calls, made once beside each default group. Collective."""
    if dist.group.WORLD not in _comparing:
        _comparing[dist.group.WORLD] = dist.new_group(backend="gloo", timeout=timeout)
    return _comparing[dist.group.WORLD]


def check_same_call(call: str, facts: tuple[Any, ...], group: Any) -> None:
    """Wait for all ranks of `group`, and check that all make this call; see [Note: comparing calls].

    Raises:
        ConfigError: some ranks make another call; raised on all ranks.
    """
    from stratagem.distributed import rounds

    mine = fingerprint(f"{call} {facts}")
    largest, smallest = rounds.all_reduce(torch.tensor([mine, -mine]), torch.maximum, group).tolist()
    if largest == -smallest:
        return
    calls: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(calls, f"{where(sys._getframe())} with {facts}", group=group)
    rank = next((rank for rank, other in enumerate(calls) if other != calls[0]), 0)
    first, other = calls[0], calls[rank]
    if first.partition(" (")[0] != other.partition(" (")[0]:  # other methods: leave out the arguments
        first, other = first.rpartition(" with ")[0], other.rpartition(" with ")[0]
    raise ConfigError(
        f"rank 0 is in {first} and rank {rank} in {other}", expected="all ranks to make the same call",
        do="call it on every rank: remove the condition around it that is true on only some ranks",
    )  # fmt: skip
