"""Collectives that autograd differentiates: gather parts of tensors, exchange rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from stratagem.api import Collectives


#: Counts as the sender of activations and of their gradients.
ACTIVATIONS = "activations"


def gather(tensor: Tensor, dim: int, over: Collectives) -> Tensor:
    """Return the parts of all ranks of `over`, concatenated along `dim` in rank order; equal shapes. Collective.

    The gradient of a part is the sum of its gradients on all ranks.
    """
    if over.world_size == 1:
        return tensor
    whole: Tensor = _Gather.apply(tensor.movedim(dim, 0), over)  # type: ignore[no-untyped-call]
    return whole.movedim(0, dim)


def exchange(
    rows: Tensor, over: Collectives, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
) -> Tensor:
    """Send rows (along dimension 0) to each rank of `over`; return those received, in rank order. Collective.

    Args:
        send: numbers of rows for each rank; equal chunks by default.
        receive: numbers of rows from each rank.
    """
    if over.world_size == 1:
        return rows
    received: Tensor = _Exchange.apply(rows, over, send, receive)  # type: ignore[no-untyped-call]
    return received


def gather_into(whole: Tensor, part: Tensor, over: Collectives) -> None:
    """Write the parts of all ranks of `over` into `whole`, one after the other; both are contiguous. Collective."""
    over.traffic.add("all_gather", part.nbytes, over.world_size, sender=ACTIVATIONS)
    # torch 2.13 renamed it, and warns about the old name.
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, part, group=over.group)


def sum_into(part: Tensor, whole: Tensor, over: Collectives) -> None:
    """Write this rank's share of the sum of `whole` over the ranks into `part`; both are contiguous. Collective."""
    over.traffic.add("reduce_scatter", whole.nbytes, over.world_size, sender=ACTIVATIONS)
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(part, whole, group=over.group)


class _Gather(torch.autograd.Function):
    """Gathers along dimension 0."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, over: Collectives) -> Tensor:
        ctx.over = over
        part = part.contiguous()
        whole = part.new_empty(over.world_size * part.shape[0], *part.shape[1:])
        gather_into(whole, part, over)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _SumOfParts.apply(gradient, ctx.over), None  # type: ignore[no-untyped-call]


class _SumOfParts(torch.autograd.Function):
    """Sums over the ranks and keeps this rank's part along dimension 0: the transpose of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, over: Collectives) -> Tensor:
        ctx.over = over
        whole = whole.contiguous()
        part = whole.new_empty(whole.shape[0] // over.world_size, *whole.shape[1:])
        sum_into(part, whole, over)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradient, ctx.over), None  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, over: Collectives, send: Sequence[int] | None, receive: Sequence[int] | None
    ) -> Tensor:
        ctx.over, ctx.send, ctx.receive = over, send, receive
        rows = rows.contiguous()
        received = rows.new_empty(len(rows) if receive is None else sum(receive), *rows.shape[1:])
        over.traffic.add("exchange", rows.nbytes, over.world_size, sender=ACTIVATIONS)
        into, out_of = (None if sizes is None else list(sizes) for sizes in (receive, send))
        dist.all_to_all_single(received, rows, into, out_of, group=over.group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        returned = _Exchange.apply(gradient, ctx.over, ctx.receive, ctx.send)  # type: ignore[no-untyped-call]
        return returned, None, None, None
