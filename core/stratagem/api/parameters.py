"""What strategies ask of parameters and optimizers: to replace parameters with all that users attached to them."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigError

#: Attribute of a parameter, while a strategy wraps the model and optimizers are made: the parameter's name.
NAME: Final = "_stratagem_name"
#: Attributes that torch sets.
_OF_TORCH: Final = "_is_param"
#: What may be asked of a parameter that was replaced: an optimizer may be made of it, and gets the new one.
_ALLOWED: Final = {Tensor.dim, Tensor.numel, Tensor.size, Tensor.is_complex, Tensor.is_floating_point} | {
    vars(torch._C.TensorBase)[name].__get__
    for name in ("is_leaf", "requires_grad", "shape", "ndim", "dtype", "device", "is_meta")
}


def replace_parameter(new: nn.Parameter, old: nn.Parameter) -> None:
    """Let `new`, such as a shard, take the place of `old` in a model: call it when `old` is no longer needed.

    `new` gets the attributes of `old` and the hooks on its gradient. Whoever still holds `old`, in a list say, and
    computes with it gets an error that names the parameter. An optimizer that was made of `old` steps `new` where the
    model has it under the same name. The memory of `old` is freed.

    Raises:
        ConfigError: `old` is of a subclass of ``nn.Parameter``, which `new` would not be, and `new` has values.
    """
    if (
        not new.is_meta
        and type(old) is not type(new)
        and type(old) is not nn.Parameter
        and nn.Parameter in type(old).__mro__
    ):
        raise ConfigError(
            f"{old.__dict__.get(NAME)!r} is a {type(old).__name__}, and the strategy replaces it by a part",
            expected="parameters of the class torch.nn.Parameter",
            do="mark it with an attribute instead, which stays, or choose a strategy that keeps parameters whole",
        )
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key != _OF_TORCH})
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks):
            setattr(new, hooks, getattr(old, hooks))
    if type(old) is nn.Parameter:
        old.data = old.data.new_empty(()).expand(old.shape)
        old.__class__ = _Replaced


class _Replaced(nn.Parameter):
    """A parameter that is no longer the model's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name = next(each.__dict__.get(NAME) for each in _flat(args, kwargs) if type(each) is cls)
        raise ConfigError(
            f"{getattr(func, '__name__', func)} is called with {name!r} as it was before the model was prepared",
            expected="a parameter that is looked up when it is used, as in self.layer.weight",
            do="do not keep it in a list or dictionary, or keep the module that has it",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"replaced parameter {self.__dict__.get(NAME)!r}"


def _flat(args: Any, kwargs: Any) -> Any:
    for each in [*args, *(kwargs or {}).values()]:
        if isinstance(each, list | tuple):
            yield from _flat(each, None)
        else:
            yield each


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer` evaluates the model itself (LBFGS): its step cannot be called without a closure."""
    step = inspect.signature(type(optimizer).step).parameters.get("closure")
    return step is not None and step.default is inspect.Parameter.empty
