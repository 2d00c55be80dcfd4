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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from stratagem_parallel.exchange import ACTIVATIONS, gather_into, sum_into
from stratagem_parallel_unchanged.tensor.slices import Slice, name_of, never_compiled_alone, part_of_slice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from stratagem.api import Collectives

_WRITING = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__", "__imatmul__", "__setitem__",
}  # fmt: skip
#: What torch's compiler makes of ``torch.utils.checkpoint.checkpoint``.
_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_OPTIONS_OF_CHECKPOINTS = {
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
}  # fmt: skip


class Sharing:
    """What layers that take the same activation share: one message for all.

    Not part of a `Line`: torch's compiler has a function of autograd return all that its result refers to.
    """

    def __init__(self) -> None:
        #: Whether compiled layers share what they take: torch traces no changes of `self` in what backward repeats.
        self.traces = True
        #: The last value that was shared, its state then, and what was returned for it.
        self._shared: tuple[Any, tuple[Any, ...], Tensor] | None = None
        #: The same, in code that torch's compiler traces.
        self._traced: tuple[Any, tuple[Any, ...], Tensor] | None = None

    def shared(self, value: Tensor, line: Line, make: Callable[[Any, Line], Tensor]) -> Tensor:
        """Return ``make(value, line)``, the same for all layers that take `value`."""
        if torch.compiler.is_compiling():
            mode = torch.is_grad_enabled(), value.requires_grad
            kept = self._traced
            if kept is None or kept[0] is not value or kept[1] != mode:
                kept = self._traced = value, mode, make(value, line)
            return kept[2]
        state = value._version, torch.is_grad_enabled(), value.requires_grad
        if self._shared is not None and self._shared[0]() is value and self._shared[1] == state:
            return self._shared[2]
        used = make(value, line)
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
        if self.traces:
            self._traced = None


class Line:
    """The ranks of one `tensor` axis: those that hold the parts of one model's layers."""

    def __init__(self, over: Collectives, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, over.rank, over.world_size
        self.connect(over, traced=False)
        self.sharing = Sharing()

    def connect(self, over: Collectives, *, traced: bool) -> None:
        """Send over `over`; `traced` says whether torch's compiler traces what layers compute."""
        self.over, self.traced = over, traced
        group = over.group or dist.group.WORLD
        assert group is not None, "ranks are connected"
        self._group_name: str = group.group_name

    def __deepcopy__(self, memo: dict[int, Any]) -> Line:
        return self  # a copied module computes with the same ranks

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
        self.over.traffic.add("all_reduce", tensor.nbytes, self.size, sender=ACTIVATIONS)
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


def _own(gradient: Tensor) -> Tensor:
    """Return a gradient as a plain tensor: a program's own function of autograd may return a slice."""
    if not isinstance(gradient, Slice):
        return gradient
    return part_of_slice(gradient)


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return tensor.detach()  # a view would keep `tensor` alive, and break where that changes in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(_own(gradient), ctx.line), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.sum(summand.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return used_by_parts(gradient, ctx.line), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.size, ctx.line = dim, tensor.shape[dim], line
        return line.part(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return whole_of(_own(gradient), ctx.dim, ctx.size, ctx.line), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, size: int, line: Line, summed: bool) -> Tensor:
        ctx.dim, ctx.line, ctx.summed = dim, line, summed
        return line.gather(part, dim, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = summed_part if ctx.summed else part_of
        return part(_own(gradient), ctx.dim, ctx.line).contiguous(), None, None, None, None


class _SumPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.size, ctx.line = dim, summand.shape[dim], line
        return line.sum_part(summand, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return whole_of(_own(gradient), ctx.dim, ctx.size, ctx.line, for_parts=True), None, None


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


def whole(value: Any) -> Any:
    """Return the whole of a slice, replicated; anything else as it is. Collective."""
    if not isinstance(value, Slice):
        return value
    return whole_of(part_of_slice(value), value.cut, value.whole_size, value.line)


def for_parts(value: Any, line: Line) -> Tensor:
    """Return the whole of `value` for ranks that compute parts with it. Collective if it is a slice."""
    if not isinstance(value, Slice):
        return used_by_parts(value, line)
    return whole_of(part_of_slice(value), value.cut, value.whole_size, value.line, for_parts=True)


def renumbered(ids: Tensor, padding: int | None, size: int, line: Line) -> tuple[Tensor, Tensor, int | None]:
    """Return where this rank's part of `size` rows has the rows `ids`, which of these others have, and the padding."""
    offset, own = line.bounds(size)
    is_here = (ids >= offset) & (ids < offset + own)
    # Numbers that no rank has stay as they are: the lookup refuses them.
    elsewhere = ~is_here & (ids >= 0) & (ids < size)
    padding = None if padding is None or not offset <= padding % size < offset + own else padding % size - offset
    return (ids - offset).masked_fill(elsewhere, 0).where(is_here | elsewhere, ids), elsewhere, padding


def all_whole(values: Any) -> Any:
    """Return `values`, any nested structure, with the whole of each slice. Collective."""
    return tree_map_only(Slice, whole, values)


def writes(name: str) -> bool:
    """Return whether a function of torch with this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING


class TracedStep(TorchFunctionMode):
    """Around a step that is compiled: has torch's compiler find slices where it would not.

    A function that writes ends what layers share, since they may take another value then.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if writes(name):
            self.line.sharing.end_group()
        if name in _CHECKPOINTS:
            return self._checkpointed(func, args, kwargs)
        if "tensors" in kwargs:  # of torch.cat
            args = (kwargs["tensors"], *args)
            kwargs = {key: value for key, value in kwargs.items() if key != "tensors"}
        if args and isinstance(args[0], tuple) and any(isinstance(each, Slice) for each in args[0]):
            args = (list(args[0]), *args[1:])
        return func(*args, **kwargs)

    def _checkpointed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a checkpoint without slices among its arguments, which it would make plain tensors."""
        options = {name: value for name, value in kwargs.items() if name in _OPTIONS_OF_CHECKPOINTS}
        given = {name: value for name, value in kwargs.items() if name not in _OPTIONS_OF_CHECKPOINTS}
        return func(lambda: args[0](*args[1:], **given), **options)


never_compiled_alone(TracedStep.__torch_function__)
