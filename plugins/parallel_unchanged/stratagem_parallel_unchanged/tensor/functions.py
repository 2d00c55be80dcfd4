"""A program's own functions of autograd and hooks, which get gradients as plain parts: here they see slices.

[Note: own functions]
``torch.autograd.Function.apply`` does not pass ``__torch_function__``. Within a step a function that gets a slice is
called as a subclass, whose backward gets gradients, and what was saved, as slices, as the forward did: a sum in it is
that of the whole, for a parameter as in plain PyTorch, and autograd goes on with the parts of what it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F  # noqa: N812

from stratagem_parallel.target_numbers import LOSSES
from stratagem_parallel_unchanged.tensor.moves import whole
from stratagem_parallel_unchanged.tensor.operands import layout_of
from stratagem_parallel_unchanged.tensor.slices import Slice, as_slice, part_of_slice

#: Where a class of the program's keeps its subclass.
_OF_SLICES = "_stratagem_of_slices"
_apply: Any = Function.__dict__["apply"]


@contextlib.contextmanager
def see_slices(*, traced: bool) -> Iterator[None]:
    """Within: see [Note: own functions].

    Args:
        traced: torch's compiler traces functions itself: it is to leave out a program's, which then run as written.
    """
    if traced:
        for cls in _programs_own(Function):
            if "forward" in cls.__dict__ and not hasattr(cls.forward, "_torchdynamo_disable"):
                cls.forward = staticmethod(torch._dynamo.disable(cls.forward))
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it reads parameters of layers that it does not call
    Function.apply = classmethod(_applied)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = _apply  # type: ignore[method-assign]
        torch.backends.mha.set_fastpath_enabled(is_fast)


def trace_loss_layers() -> None:
    """Have torch's compiler trace an ``nn.CrossEntropyLoss`` that a step makes as the function, which asks slices."""
    from torch._dynamo import variables

    def layer(_: Any, tx: Any, args: Any, options: Any) -> Any:
        given = dict(zip(LOSSES[F.cross_entropy][2:], args, strict=False)) | options
        function = variables.base.VariableTracker.build(tx, F.cross_entropy)
        return variables.LambdaVariable(lambda *both: function.call_function(tx, [*both], given))

    variables.UserDefinedClassVariable._call_cross_entropy_loss = layer


def _programs_own(cls: Any) -> Iterator[Any]:
    """Yield the subclasses of `cls` that neither torch nor stratagem defines."""
    for each in cls.__subclasses__():
        if not each.__module__.startswith(("torch.", "stratagem")):
            yield each
        yield from _programs_own(each)


def hook_of_slices(hook: Callable[[Tensor], Any], made: Slice) -> Callable[[Tensor], Any]:
    """Return a hook on the gradient of `made` that calls the program's with a slice."""
    layout = layout_of(made)
    return lambda gradient: _part(hook(as_slice(gradient, *layout)), layout)


def _applied(cls: type[Function], *args: Any, **options: Any) -> Any:
    if any(isinstance(each, Slice) for each in args):
        cls = cls.__dict__.get(_OF_SLICES) or _subclass(cls)
    return _apply.__func__(cls, *args, **options)


def _subclass(cls: Any) -> Any:
    def forward(context: Any, *args: Any) -> Any:
        output = cls.forward(context, *args)
        _remember(context, args, output)
        return output

    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        cls.setup_context(context, inputs, output)
        _remember(context, inputs, output)

    def backward(context: Any, *gradients: Any) -> Any:
        _, taken, given = context._stratagem_layouts
        found = differentiate(_Context(context), *map(_slice, gradients, given))
        return tuple(map(_part, found if isinstance(found, tuple) else (found,), taken))

    differentiate = cls.vjp if cls.backward is Function.backward else cls.backward
    has_setup = cls.setup_context is not Function.setup_context
    own = {"setup_context": staticmethod(setup_context)} if has_setup else {"forward": staticmethod(forward)}
    made = type(cls.__name__, (cls,), own | {"backward": staticmethod(backward), "__module__": cls.__module__})
    setattr(cls, _OF_SLICES, made)
    return made


class _Context:
    """The context of a backward, whose saved tensors are slices again: autograd keeps outputs as plain tensors."""

    def __init__(self, context: Any) -> None:
        object.__setattr__(self, "_context", context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(map(_slice, self._context.saved_tensors, self._context._stratagem_layouts[0]))


def _remember(context: Any, inputs: Any, output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    saved = getattr(context, "to_save", None) or ()
    context._stratagem_layouts = tuple([_layout(each) for each in values] for values in (saved, inputs, outputs))


def _layout(value: Any) -> Any:
    return layout_of(value) if isinstance(value, Slice) else None


def _slice(value: Any, layout: Any) -> Any:
    return value if value is None or layout is None or isinstance(value, Slice) else as_slice(value, *layout)


def part_for(gradient: Any, made: Any) -> Any:
    """Return a gradient of `made` as autograd goes on with it."""
    return _part(gradient, _layout(made))


def _part(gradient: Any, layout: Any) -> Any:
    """Return a gradient as autograd goes on with it: the part of a slice's, the whole of any other."""
    if not isinstance(gradient, Tensor) or layout is None:
        return whole(gradient)
    if isinstance(gradient, Slice) and layout_of(gradient) == layout:
        return part_of_slice(gradient)
    cut, size, line = layout
    gradient = whole(gradient)
    return line.part(gradient, cut) if gradient.shape[cut] == size else gradient
