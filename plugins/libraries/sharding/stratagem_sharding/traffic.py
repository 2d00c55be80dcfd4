"""Count what FSDP sends, and announce each of its collectives to the order of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from stratagem_sharding.buffers import BufferPool, is_pooled
from stratagem_sharding.param_groups import param_groups
from stratagem_sharding.unit_order import UnitOrder


def count_bytes(
    units: Sequence[Any], num_replicas: int, traffic: Any, order: UnitOrder, buffers: BufferPool
) -> None:  # fmt: skip
    """Have `units` count in `traffic` what they send from `buffers`, and announce it to `order` before."""
    for unit in units:
        unit.set_custom_all_gather(_CountingAllGather(traffic, order, order.number(unit), buffers))
        unit.set_custom_reduce_scatter(_CountingReduceScatter(traffic, buffers))
        for group in param_groups(unit._get_fsdp_state()):
            order.watch_gradients(unit, group)
        if num_replicas > 1:  # FSDP calls it after it has averaged over replicas itself
            unit.set_all_reduce_hook(
                lambda reduced: traffic.add("all_reduce", reduced.nbytes, num_replicas, sender="gradients")
            )


class _CountingAllGather(DefaultAllGather):
    def __init__(self, traffic: Any, order: UnitOrder, number: int, buffers: BufferPool) -> None:
        super().__init__()
        self._traffic, self._order, self._event, self._buffers = traffic, order, ("unit", number), buffers

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffers.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._order.next(self._event)
        self._traffic.add("all_gather", input_tensor.nbytes, group.size(), sender="parameters")
        if not async_op and is_pooled(output_tensor) and dist.get_backend(group) == "gloo":
            _gather_in_place(output_tensor, group)
            return None
        return super().__call__(output_tensor, input_tensor, group, async_op)


def _gather_in_place(output: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather `output`, which has this rank's part: gloo's all-gather would copy it to new memory and back."""
    parts, rank = output.view(group.size(), -1), group.rank()
    others = [other for other in range(group.size()) if other != rank]
    works = [dist.irecv(parts[other], group=group, group_src=other) for other in others]
    works += [dist.isend(parts[rank], group=group, group_dst=other) for other in others]
    for work in works:
        if work is not None:
            work.wait()


class _CountingReduceScatter(DefaultReduceScatter):
    def __init__(self, traffic: Any, buffers: BufferPool) -> None:
        super().__init__()
        self._traffic, self._buffers, self._has_input = traffic, buffers, False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._has_input:  # the output becomes the gradients, which stay until the next step
            return super().allocate(size, dtype=dtype, device=device)
        self._has_input = True
        return self._buffers.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        self._has_input = False
        self._traffic.add("reduce_scatter", input_tensor.nbytes, group.size(), sender="gradients")
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
