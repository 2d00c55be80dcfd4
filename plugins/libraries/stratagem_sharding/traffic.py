"""Count what FSDP sends, and announce each of its collectives to the order of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from stratagem.distributed.process_group import MESSAGE_TAG
from stratagem_sharding.memory import BufferPool, is_pooled
from stratagem_sharding.param_groups import param_groups
from stratagem_sharding.unit_order import UnitOrder

#: gloo's largest segment of a message, in bytes.
_SEGMENT = 1 << 20


def count_bytes(
    units: Sequence[Any], num_replicas: int, traffic: Any, order: UnitOrder, messages: BufferPool, gradients: BufferPool
) -> None:  # fmt: skip
    """Have `units` count in `traffic` what they send, and announce it to `order` before.

    What is sent and received is in buffers of `messages`, reduced gradients are in those of `gradients`.
    """
    for unit in units:
        unit.set_custom_all_gather(_CountingAllGather(traffic, order, order.number(unit), messages))
        unit.set_custom_reduce_scatter(CountingReduceScatter(traffic, messages, gradients))
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
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._order.next(self._event)
        self._traffic.add("all_gather", input_tensor.nbytes, group.size(), sender="parameters")
        if output_tensor.itemsize == 1:  # gloo gathers no float8, and a gather changes no bytes
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        if not async_op and is_pooled(output_tensor) and dist.get_backend(group) == "gloo":
            _gather_in_place(output_tensor, group)
            return None
        return super().__call__(output_tensor, input_tensor, group, async_op)


def _gather_in_place(output: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather `output`, which has this rank's part: gloo's all-gather would copy it to new memory and back."""
    parts, rank = output.view(group.size(), -1), group.rank()
    _exchange({other: (parts[rank], parts[other]) for other in range(group.size()) if other != rank}, group)


def _reduce_directly(
    output: torch.Tensor, parts: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Set `output` to the sum of this rank's row of `parts` over the ranks.

    gloo's reduce-scatter would copy all rows to new memory, and all-reduce them: twice the bytes. The ranks are added
    in the order of gloo's ring, which the bits of a sum depend on: downwards from the rank before the one that gloo
    would reduce a value on, and that one last. It is this rank for all but the first values of a row.
    """
    rank, size = group.rank(), group.size()
    rows = dict(zip((each for each in range(size) if each != rank), received, strict=True))
    _exchange({other: (parts[other], row) for other, row in rows.items()}, group)
    rows[rank] = parts[rank]
    length, chunk = parts.shape[1], _chunk(parts.numel(), parts.itemsize, size)
    start = 0
    while start < length:
        reducer = (rank * length + start) // chunk
        part = slice(start, min(length, (reducer + 1) * chunk - rank * length))
        _add([rows[(reducer - distance) % size][part] for distance in range(1, size + 1)], output[part])
        start = part.stop


def _add(rows: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    torch.add(rows[0], rows[1], out=output)
    for row in rows[2:]:
        output.add_(row)


def _chunk(count: int, itemsize: int, size: int) -> int:
    """Return how many of `count` values gloo's all-reduce reduces on each of `size` ranks.

    They are a number of segments of up to a megabyte, all of one length, at least two for each rank.
    """
    segments = max(-(-count // (_SEGMENT // itemsize) // size), 2)
    return segments * -(-count // (segments * size))


def _exchange(messages: dict[int, tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Send the first tensor to each of the other ranks in `group`, and receive the second."""
    ends: dict[str, Any] = {"group": group, "tag": MESSAGE_TAG}
    works = [dist.irecv(theirs, group_src=other, **ends) for other, (_, theirs) in messages.items()]
    works += [dist.isend(ours, group_dst=other, **ends) for other, (ours, _) in messages.items()]
    for work in works:
        if work is not None:
            work.wait()


class CountingReduceScatter(DefaultReduceScatter):
    def __init__(self, traffic: Any, messages: BufferPool, gradients: BufferPool) -> None:
        super().__init__()
        self._traffic, self._messages, self._gradients, self._has_input = traffic, messages, gradients, False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # The output becomes the gradients, which stay until the next step.
        buffers = self._gradients if self._has_input else self._messages
        self._has_input = True
        return buffers.empty(size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]  # torch does not use what it returns
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._has_input = False
        self._traffic.add("reduce_scatter", input_tensor.nbytes, group.size(), sender="gradients")
        known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if known and not async_op and is_pooled(input_tensor) and dist.get_backend(group) == "gloo":
            parts = input_tensor.view(group.size(), -1)
            received = self._messages.empty(
                (group.size() - 1, parts.shape[1]), dtype=parts.dtype, device=parts.device
            )  # fmt: skip
            _reduce_directly(output_tensor, parts, received, group)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())
            return None
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
