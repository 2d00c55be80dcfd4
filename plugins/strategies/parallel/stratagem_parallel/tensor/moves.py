"""Send activations along the axis `tensor`, forward and backward.

A replicated tensor is equal on all ranks of the axis, and so is its gradient. A part is one rank's piece of a tensor
that is cut along one dimension; pieces are those of ``torch.chunk``, so the last ones may be shorter. A summand is a
tensor whose sum over the ranks is meant.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from stratagem_parallel.exchange import gather_into, sum_into

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from stratagem.api import Collectives


class Line:
    """The ranks of one `tensor` axis: those that hold the parts of one model's layers."""

    def __init__(self, over: Collectives, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, over.rank, over.world_size
        self.connect(over, traced=False)
        #: Whether compiled layers share what they take: torch traces no changes of `self` in what backward repeats.
        self.shares = True
        #: The last value that was shared, its version and the mode of gradients then, and what was returned for it.
        self._shared: tuple[Any, tuple[int, bool], Tensor] | None = None
        #: The last value that was shared in code that torch's compiler traces, the mode then, and what was returned.
        self._traced: tuple[Any, bool, Tensor] | None = None

    def connect(self, over: Collectives, *, traced: bool) -> None:
        """Send over `over`; `traced` says whether torch's compiler traces what layers compute."""
        self.over, self.traced = over, traced
        group = over.group or dist.group.WORLD
        assert group is not None, "ranks are connected"
        self._group_name: str = group.group_name

    def __deepcopy__(self, memo: dict[int, Any]) -> Line:
        return self  # a copied module computes with the same ranks

    def shared(self, value: Any, part: Tensor, make: Callable[[Any, Line], Tensor]) -> Tensor:
        """Return ``make(value, self)``, the same for all layers that take `value`: one message for all.

        Args:
            part: the tensor that `value` is, or its part.
        """
        if self.traced:
            kept = self._traced
            if kept is None or kept[0] is not value or kept[1] != torch.is_grad_enabled():
                kept = self._traced = value, torch.is_grad_enabled(), make(value, self)
            return kept[2]
        state = part._version, torch.is_grad_enabled()
        if self._shared is not None and self._shared[0]() is value and self._shared[1] == state:
            return self._shared[2]
        used = make(value, self)
        if used is not value:
            self._shared = weakref.ref(value, self._forget), state, used
        return used

    def _forget(self, reference: Any) -> None:
        if self._shared is not None and self._shared[0] is reference:
            self._shared = None

    def forget(self) -> None:
        """Forget the last activation that layers shared: called after a step."""
        self._shared = self._traced = None

    def end_group(self) -> None:
        """Forget what layers shared in compiled code: what they took was written to, or is not needed any more."""
        if self.shares:
            self._traced = None

    def bounds(self, size: int) -> tuple[int, int]:
        """Return the offset and the length of this rank's part of a dimension of `size`."""
        chunk = -(-size // self.size)
        offset = min(self.rank * chunk, size)
        return offset, min(chunk, size - offset)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a replicated `tensor`, as a view."""
        return tensor.narrow(dim, *self.bounds(tensor.shape[dim]))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks, in its own memory. Collective."""
        return self._reduce(tensor, "sum")

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum of `tensor` over the ranks, in its own memory. Collective."""
        return self._reduce(tensor, "max")

    def _reduce(self, tensor: Tensor, op: str) -> Tensor:
        tensor = tensor.contiguous()
        if torch.compiler.is_compiling():
            return _received("all_reduce", tensor, op, self._group_name)
        self.over.traffic.add("all_reduce", tensor.nbytes, self.size)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.over.group)
        return tensor

    def gather(self, part: Tensor, dim: int, size: int) -> Tensor:
        """Return the whole of which each rank has a `part` along `dim`; `size` is the whole's. Collective."""
        chunk = -(-size // self.size)
        part = _padded(part, dim, chunk).contiguous()
        if torch.compiler.is_compiling():
            parts = _received("all_gather_into_tensor", part, self.size, self._group_name)
            parts = parts.view(self.size, *part.shape)
        else:
            parts = part.new_empty(self.size, *part.shape)
            gather_into(parts.flatten(0, 1), part, self.over)
        whole = parts.movedim(0, dim).flatten(dim, dim + 1)  # a copy, unless `dim` is the first
        return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size)

    def sum_part(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks. Collective."""
        size = summand.shape[dim]
        chunk = -(-size // self.size)
        padded = _padded(summand, dim, chunk * self.size)
        pieces = padded.reshape(*padded.shape[:dim], self.size, chunk, *padded.shape[dim + 1 :]).movedim(dim, 0)
        pieces = pieces.contiguous().flatten(0, 1)
        if torch.compiler.is_compiling():
            part = _received("reduce_scatter_tensor", pieces, "sum", self.size, self._group_name)
        else:
            part = summand.new_empty(pieces.shape[0] // self.size, *pieces.shape[1:])
            sum_into(part, pieces, self.over)
        return part.narrow(dim, 0, self.bounds(size)[1])


def _received(name: str, *given: Any) -> Tensor:
    """Return the result of one of torch's functional collectives, which its compiler traces."""
    sent = getattr(torch.ops._c10d_functional, name)(*given)
    received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return tensor.detach()  # a view would keep `tensor` alive, and break where that changes in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.line.sum(gradient.clone()), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, summand: Tensor, line: Line) -> Tensor:
        return line.sum(summand.clone())

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.size, ctx.line = dim, tensor.shape[dim], line
        return line.part(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.line.gather(gradient, ctx.dim, ctx.size), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, size: int, line: Line, summed: bool) -> Tensor:
        ctx.dim, ctx.line, ctx.summed = dim, line, summed
        return line.gather(part, dim, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = ctx.line.sum_part(gradient, ctx.dim) if ctx.summed else ctx.line.part(gradient, ctx.dim).contiguous()
        return part, None, None, None, None


class _SumPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.size, ctx.line = dim, summand.shape[dim], line
        return line.sum_part(summand, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.line.gather(gradient, ctx.dim, ctx.size), None, None


def used_by_parts(tensor: Tensor, line: Line) -> Tensor:
    """Return a replicated `tensor` to compute parts with: its gradient is the sum of the ranks'."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    out: Tensor = _SumOfGradients.apply(tensor, line)  # type: ignore[no-untyped-call]
    return out


def summed(summand: Tensor, line: Line) -> Tensor:
    """Return the sum of the ranks' summands, replicated. Collective."""
    out: Tensor = _Sum.apply(summand, line)  # type: ignore[no-untyped-call]
    return out


def summed_part(summand: Tensor, dim: int, line: Line) -> Tensor:
    """Return this rank's part along `dim` of the sum of the ranks' summands. Collective."""
    out: Tensor = _SumPart.apply(summand, dim, line)  # type: ignore[no-untyped-call]
    return out


def part_of(tensor: Tensor, dim: int, line: Line) -> Tensor:
    """Return this rank's part of a replicated `tensor` along `dim`. Its backward is collective."""
    out: Tensor = _Part.apply(tensor, dim, line)  # type: ignore[no-untyped-call]
    return out


def whole_of(part: Tensor, dim: int, size: int, line: Line, *, for_parts: bool = False) -> Tensor:
    """Return the whole of the ranks' parts along `dim`. Collective.

    Args:
        size: of the whole along `dim`.
        for_parts: whether the ranks compute different parts with it, so that its gradient is the sum of theirs.
    """
    out: Tensor = _Whole.apply(part, dim, size, line, for_parts)  # type: ignore[no-untyped-call]
    return out
