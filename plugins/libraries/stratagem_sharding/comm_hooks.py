"""Average gradients over replicas through comm hooks, a bucket for each unit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stratagem.api import Bucket
from stratagem_sharding.param_groups import shards_in


def send_through_hooks(units: list[nn.Module], reduce: Callable[[Bucket], Any]) -> None:
    """Have `reduce` average over the replicas what `units` have reduced over their shards."""

    def average(index: int, unit: FSDPModule, reduced: torch.Tensor) -> None:
        parameters, gradients = shards_in(unit, reduced)
        # Each bucket is the last of its kind: FSDP uses the result at once.
        bucket = Bucket(buffer=reduced, index=index, parameters=parameters, gradients=gradients)
        reduced.copy_(reduce(bucket).wait())
        keep_for_this_stream(reduced)

    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule), "it was sharded"
        unit.set_all_reduce_hook(functools.partial(average, index, unit))


def keep_for_this_stream(reduced: torch.Tensor) -> None:
    """Have the allocator keep the memory of `reduced` until what the present stream does with it is done.

    FSDP calls hooks on the stream of its all-reduce, and allocates `reduced` on that of its reduce-scatter. For its own
    all-reduce it holds a reference to the tensor; after a hook the next unit's reduce-scatter might get the memory too
    soon.
    """
    if reduced.device.type != "cpu":
        reduced.record_stream(torch.accelerator.current_stream(reduced.device))
