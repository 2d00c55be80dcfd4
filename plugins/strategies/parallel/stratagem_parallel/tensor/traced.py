"""`TracedSlice`: a `Slice` that torch's compiler traces.

[Note: traced slices]
The compiler makes no tensors of classes that it does not know, and traces calls of objects that are not tensors. In a
run that compiles, layers that are cut therefore return such an object, in compiled code and outside: the same rules
apply, the parts are all that is in a graph, and autograd sees nothing else. ``isinstance(x, torch.Tensor)`` is False
for it; a step's result is whole, as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem_parallel.tensor.moves import Line

#: Methods whose answer for a part is that for the whole.
_METHODS_OF_PARTS = {
    "dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device", "is_signed",
    "is_inference", "register_hook", "retain_grad",
}  # fmt: skip
_OF_PARTS = _METHODS_OF_PARTS | {
    "dtype", "device", "requires_grad", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
    "is_nested", "is_xla", "is_mps", "is_xpu", "itemsize", "grad_fn", "is_leaf", "ndim",
}  # fmt: skip
#: What this class answers by methods of that name.
ANSWERED = _METHODS_OF_PARTS | {"size", "numel", "nelement", "__len__", "__hash__"}
_NAMES = frozenset(dir(torch.Tensor))
_PROPERTIES = frozenset(name for name in _NAMES if not callable(getattr(torch.Tensor, name)))
_OPERATORS = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "pow",
    "rpow", "neg", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "abs", "matmul", "rmatmul",
    "getitem", "setitem", "mod", "rmod", "floordiv", "rfloordiv", "bool", "float", "int", "contains", "iter",
)  # fmt: skip

_WRITING = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__", "__imatmul__", "__setitem__",
}  # fmt: skip


@dataclass(eq=False, repr=False)  # hooks of torch, such as fully_shard's, find the tensors of one
class TracedSlice:
    """See [Note: traced slices]."""

    #: Applies a function of torch with this name: `rules` sets it.
    apply: ClassVar[Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]]

    part: Tensor
    cut: int
    _size: int
    line: Line

    @property
    def shape(self) -> torch.Size:
        shape = list(self.part.shape)
        shape[self.cut] = self._size
        return torch.Size(shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        return self.shape[0]

    def to_local(self) -> Tensor:
        """Return this rank's part, as a DTensor's method of that name does."""
        return self.part

    def __repr__(self) -> str:
        return f"TracedSlice(shape={tuple(self.shape)}, cut={self.cut}, dtype={self.dtype})"

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PARTS:
            return getattr(self.part, name)
        if name not in _NAMES:
            raise AttributeError(f"a tensor has no attribute {name!r}")
        if name in _PROPERTIES:
            return TracedSlice.apply(name, None, (self,), {})
        return functools.partial(_call, name, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.apply(name_of(func), func, args, kwargs or {})


def _call(name: str, made: TracedSlice, *args: Any, **options: Any) -> Any:
    return TracedSlice.apply(name, getattr(torch.Tensor, name), (made, *args), options)


def _operator(name: str) -> Any:
    def apply(self: TracedSlice, *args: Any) -> Any:
        return TracedSlice.apply(name, getattr(torch.Tensor, name), (self, *args), {})

    return apply


for _name in _OPERATORS:
    setattr(TracedSlice, f"__{_name}__", _operator(f"__{_name}__"))


def writes(name: str) -> bool:
    """Return whether a function of torch with this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING


def name_of(func: Any) -> str:
    """Return the name of a function of torch; its compiler takes that for a constant."""
    return getattr(func, "__name__", "")


name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result imports dynamo


class TracedStep(TorchFunctionMode):
    """Around a step whose layers are traced.

    Has functions take a list where a program gives a tuple: in a tuple, torch's compiler finds no slices. A function
    that writes ends what layers share, since they may take another value afterwards.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], tuple) and any(isinstance(each, TracedSlice) for each in args[0]):
            args = (list(args[0]), *args[1:])
        if writes(name_of(func)):
            self.line.end_group()
        return func(*args, **(kwargs or {}))


# Those of torch before 2.13 find these.
_pytree.register_pytree_node(
    TracedSlice,
    lambda made: ([made.part], (made.cut, made._size, made.line)),
    lambda parts, layout: TracedSlice(*parts, *layout),
)
