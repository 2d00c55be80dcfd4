"""Views of an activation for which the whole was gathered: copies, to which a program must not write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stratagem.errors import ConfigError
from stratagem_parallel_unchanged.tensor.moves import writes
from stratagem_parallel_unchanged.tensor.slices import name_of, never_compiled_alone

#: Functions whose result shares memory with their first argument, for most arguments.
_VIEWS = {
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims",
    "unsqueeze", "squeeze", "expand", "expand_as", "split", "chunk", "split_with_sizes", "unbind", "select", "narrow",
    "movedim", "moveaxis", "diagonal", "t", "tensor_split", "hsplit", "vsplit", "dsplit", "unfold", "as_strided",
    "detach", "adjoint", "ravel", "view_as_real", "view_as_complex",
}  # fmt: skip
#: What a tensor keeps of itself.
_OF_ITSELF = {"__get__", "__set__", "register_hook", "retain_grad", "requires_grad_"}
_PROPERTIES = {"T", "mT", "H", "mH", "data", "real", "imag"}


class CopiedView(Tensor):
    """A copy that stands for a view: reading gives what the view has, and what it returns is a tensor as usual."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if name in _OF_ITSELF:
            with torch._C.DisableTorchFunction():
                out = func(*args, **(kwargs or {}))
        else:
            if args and isinstance(args[0], CopiedView) and writes(name):
                raise unwritable(name)
            out = func(*without_marks(args), **without_marks(kwargs or {}))
        return marked(out) if args and isinstance(args[0], CopiedView) and is_view(func, args) else out


never_compiled_alone(CopiedView.__torch_function__)


def is_view(func: Any, args: Any) -> bool:
    """Return whether `func` returns views of the first of `args`."""
    name = name_of(func)
    if name == "__getitem__":  # tensors and lists choose elements of a copy
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index)
    return name in _VIEWS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _PROPERTIES)


def marked(values: Any) -> Any:
    """Return tensors in `values`, a nested structure, as copies of views."""
    with torch._C.DisableTorchFunction():
        return tree_map_only(Tensor, lambda each: each.as_subclass(CopiedView), values)


def without_marks(values: Any) -> Any:
    """Return `values`, a nested structure, with copies of views as plain tensors."""
    with torch._C.DisableTorchFunction():
        return tree_map_only(CopiedView, lambda each: each.as_subclass(Tensor), values)


def unwritable(name: str) -> ConfigError:
    return ConfigError(
        f"{name} writes to an activation that tensor parallelism cuts, in a way that parts do not allow",
        expected="an operation that returns a new tensor",
        do="make the layer before it gather its output: give it the style 'colwise_gather_output'",
    )
