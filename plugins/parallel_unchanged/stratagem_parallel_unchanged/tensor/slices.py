"""`Slice`: one rank's part of an activation, which has the shape of the whole for a program.

[Note: slices]
A layer that is cut returns a `Slice`. The model's code sees the shape of the whole activation, so it needs no change:
``x.view(batch, length, heads, -1)`` means all heads. Operations that a rank can apply to its part alone are applied to
the part (`rules`); the whole is gathered for any other operation, which is then right and costs memory. A replicated
tensor that takes part, a parameter or a mask, is cut or used whole as its shape asks, and its gradient is completed.

The tensor is the part: its memory, its gradient and its history are those of the part, so that autograd, its functions
and hooks work as they do for any tensor, and torch's compiler traces what the rules do. Only functions of torch, which
pass ``__torch_function__``, know the whole. Within the rules, torch sees parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._guards import TracingContext

_eval_frame = torch._C._dynamo.eval_frame

if TYPE_CHECKING:
    from torch import Tensor


class Slice(torch.Tensor):
    """See [Note: slices]."""

    #: The dimension that is cut, and the size of the whole along it.
    cut: int
    whole_size: int
    #: The `moves.Line` of the ranks that hold the other parts.
    line: Any
    #: Whether it is a copy that stands for a view, to which a program must not write.
    copied = False
    #: Applies a function of torch with this name: `rules` sets it.
    apply: ClassVar[Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]]
    #: Sizes of what enters a compiled graph are not symbols: a graph would ask this class for them.
    _dynamo_static_indices: ClassVar[set[int]] = set(range(16))

    def to_local(self) -> Tensor:
        """Return this rank's part, as a DTensor's method of that name does."""
        return part_of_slice(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and any(issubclass(each, torch.nn.Parameter) for each in types):
            return NotImplemented  # one that another took the place of: it refuses to be used
        with torch._C.DisableTorchFunction():
            # torch's compiler asks what is in memory. What it traces is a program's.
            if not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None:
                return func(*args, **(kwargs or {}))
            return cls.apply(name_of(func), func, args, kwargs or {})


def never_compiled_alone(function: Any) -> None:
    """Have torch's compiler trace `function` as part of what calls it, and skip it elsewhere."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))


never_compiled_alone(Slice.__torch_function__)


def as_slice(part: Tensor, cut: int, size: int, line: Any) -> Slice:
    """Return the slice of which `part` is this rank's; `size` is the whole's along the dimension `cut`."""
    made = part.as_subclass(Slice)
    made.cut, made.whole_size, made.line = cut % part.dim(), size, line
    return made


def part_of_slice(made: Slice) -> Tensor:
    """Return this rank's part of `made`, with its gradient history."""
    with torch._C.DisableTorchFunction():
        return plain(made)


def plain(made: Tensor) -> Tensor:
    """Return `made` as a tensor of torch's own class: of a slice, the part. Within the rules only."""
    if torch.compiler.is_dynamo_compiling():
        return made.view_as(made)  # which is plain there; it has no rule for the other way
    return made.as_subclass(torch.Tensor)


def shape_of(value: Tensor) -> torch.Size:
    """Return the shape that a program sees. Within the rules only."""
    if not isinstance(value, Slice):
        return value.shape
    shape = list(value.shape)
    shape[value.cut] = value.whole_size
    return torch.Size(shape)


def numel_of(made: Slice) -> int:
    """Return the number of elements of the whole. Within the rules only."""
    return math.prod(shape_of(made))


def name_of(func: Any) -> str:
    """Return the name of a function of torch; its compiler takes that for a constant."""
    return getattr(func, "__name__", "")


name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result imports dynamo
