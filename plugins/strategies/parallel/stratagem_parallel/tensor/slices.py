"""`Slice`: one rank's part of an activation, which has the shape of the whole.

[Note: slices]
A layer that is cut returns a `Slice`. The model's code sees the shape of the whole activation, so it needs no change:
``x.view(batch, length, heads, -1)`` means all heads. Operations that a rank can apply to its part alone are applied to
the part (`rules`); the whole is gathered for any other operation, which is then right and costs memory. A replicated
tensor that takes part, a parameter or a mask, is cut or used whole as its shape asks, and its gradient is completed.

Rules work on torch functions, above autograd: what autograd records are operations on parts. What calls autograd
directly (``torch.autograd.Function``, as fully_shard's hooks do) sees a tensor that was made from the part by `_Made`,
so gradients come back to the part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from stratagem.errors import ConfigError
from stratagem_parallel.tensor.moves import whole_of
from stratagem_parallel.tensor.traced import TracedSlice

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem_parallel.tensor.moves import Line

#: Operations on whole Slices below autograd: of equal parts, the results are parts.
_BELOW = {
    "view",
    "alias",
    "detach",
    "clone",
    "add",
    "mul",
    "zeros_like",
    "ones_like",
    "_to_copy",
    "view_as",
    "_unsafe_view",
}


class Slice(torch.Tensor):
    """See [Note: slices]."""

    #: This rank's part, which has the gradient history.
    part: Tensor
    #: The dimension that is cut.
    cut: int
    line: Line
    #: Autograd's node that made it; another one means that somebody else has used autograd on it.
    _made_by: Any
    #: Applies a function of torch: `rules` sets it.
    apply: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def __new__(cls, part: Tensor, cut: int, size: int, line: Line) -> Slice:
        shape = list(part.shape)
        shape[cut] = size
        made: Slice = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        made.part, made.cut, made.line, made._made_by = part, cut, line, None
        return made

    def to_local(self) -> Tensor:
        """Return this rank's part, as a DTensor's method of that name does."""
        return part_of_slice(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls.apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its own default
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Apply what autograd itself does, such as adding gradients of equal parts."""
        slices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Slice)]
        first = slices[0]
        name = func._schema.name.split("::")[-1]
        same = all((each.cut, each.shape) == (first.cut, first.shape) for each in slices)
        if name not in _BELOW or not same:
            raise ConfigError(
                f"{func} is applied below autograd to an activation that tensor parallelism cuts",
                expected="torch's functions, which are applied to parts or gather the whole",
                do="make the layer before it gather its output: give it the style 'colwise_gather_output'",
            )
        if name in ("view", "_unsafe_view"):
            if tuple(args[1]) != tuple(first.shape):
                raise ConfigError("an activation that tensor parallelism cuts is reshaped below autograd")
            return Slice(first.part.view_as(first.part), first.cut, first.shape[first.cut], first.line)
        out = func(*tree_map_only(Slice, _part, args), **tree_map_only(Slice, _part, kwargs or {}))
        return Slice(out, first.cut, first.shape[first.cut], first.line)


#: What rules take and return: both have `part`, `cut` and `line`.
AnySlice = Slice | TracedSlice
SLICES = (Slice, TracedSlice)


def _part(value: Slice) -> Tensor:
    return value.part


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: int, size: int, line: Line) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.line = cut, line
        return Slice(part, cut, size, line)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is not None:  # a whole one was computed outside of the rules, on all ranks
            gradient = gradient.part if isinstance(gradient, Slice) else ctx.line.part(gradient, ctx.cut)
        return gradient, None, None, None


class _PartOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Slice) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.of = made.cut, made.shape[made.cut], made.line
        return made.part.detach().view_as(made.part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else Slice(gradient, *ctx.of)


def as_slice(part: Tensor, cut: int, size: int, line: Line) -> AnySlice:
    """Return the slice of which `part` is this rank's; `size` is the whole's along the dimension `cut`."""
    cut %= part.dim()
    if line.traced:
        return TracedSlice(part, cut, size, line)
    with torch._C.DisableTorchFunctionSubclass():
        if not (part.requires_grad and torch.is_grad_enabled()):
            return Slice(part, cut, size, line)
        made: Slice = _Made.apply(part, cut, size, line)  # type: ignore[no-untyped-call]
        made.part, made._made_by = part, made.grad_fn
    return made


def part_of_slice(made: AnySlice) -> Tensor:
    """Return this rank's part of `made`, with its gradient history."""
    if isinstance(made, TracedSlice):
        return made.part
    with torch._C.DisableTorchFunctionSubclass():
        if made.grad_fn is made._made_by:
            return made.part
        part: Tensor = _PartOf.apply(made)  # type: ignore[no-untyped-call]
        return part


def whole(value: Any) -> Any:
    """Return the whole of a slice, replicated; anything else as it is. Collective."""
    if not isinstance(value, SLICES):
        return value
    if isinstance(value, TracedSlice):
        return whole_of(value.part, value.cut, value.shape[value.cut], value.line)
    with torch._C.DisableTorchFunctionSubclass():
        return whole_of(part_of_slice(value), value.cut, value.shape[value.cut], value.line)


def all_whole(values: Any) -> Any:
    """Return `values`, any nested structure, with the whole of each slice. Collective."""
    return tree_map_only(SLICES, whole, values, is_leaf=_is_slice)


def _is_slice(value: Any) -> bool:
    return isinstance(value, SLICES)
