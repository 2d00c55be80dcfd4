"""Count what FSDP sends, and announce each of its collectives to the order of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from stratagem_sharding.param_groups import param_groups
from stratagem_sharding.unit_order import UnitOrder


def count_bytes(units: Sequence[Any], num_replicas: int, traffic: Any, order: UnitOrder) -> None:
    """Have `units` count in `traffic` what they send, and announce it to `order` before."""
    for unit in units:
        unit.set_custom_all_gather(_CountingAllGather(traffic, order, order.number(unit)))
        unit.set_custom_reduce_scatter(_CountingReduceScatter(traffic))
        for group in param_groups(unit._get_fsdp_state()):
            order.watch_gradients(unit, group)
        if num_replicas > 1:  # FSDP calls it after it has averaged over replicas itself
            unit.set_all_reduce_hook(
                lambda reduced: traffic.add("all_reduce", reduced.nbytes, num_replicas, sender="gradients")
            )


class _CountingAllGather(DefaultAllGather):
    def __init__(self, traffic: Any, order: UnitOrder, number: int) -> None:
        super().__init__()
        self._traffic, self._order, self._event = traffic, order, ("unit", number)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._order.next(self._event)
        self._traffic.add("all_gather", input_tensor.nbytes, group.size(), sender="parameters")
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _CountingReduceScatter(DefaultReduceScatter):
    def __init__(self, traffic: Any) -> None:
        super().__init__()
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        self._traffic.add("reduce_scatter", input_tensor.nbytes, group.size(), sender="gradients")
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
