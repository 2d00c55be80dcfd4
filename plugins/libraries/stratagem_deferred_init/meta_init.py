"""Build a model on the meta device, and record how its parameters are initialized, to repeat that later.

A model that does not fit into one process must not be allocated there at any moment. Under `meta_init` a parameter that
is made with ``torch.empty``, as those of torch's own modules are, has a shape and no memory.

[Note: recorded initialization]
Every in-place operation on such a parameter while the model is built (by a constructor, by
``self.apply(init_weights)``, by ``load_state_dict``) is recorded on it, and repeated when it is allocated, with
random numbers that depend only on the seed and on the parameter's name. So the values are the same on every rank, in
any order. What cannot be repeated (a write to a part of the parameter, or one computed
from another parameter) is left to the module's own ``reset_parameters`` if it happens there, and is an error
elsewhere. Parameters that have values before they are parameters (``nn.Parameter(torch.ones(8))``) keep them. So do
buffers: they are small, and often computed.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from attrs import define
from torch import nn
from torch.overrides import TorchFunctionMode

from stratagem.errors import ConfigError

#: Attribute of a meta parameter: the recorded operations on it, a list of `_Operation`.
INITIAL = "_stratagem_initial"
RESETS = ("reset_parameters", "_reset_parameters")
_WITHOUT_VALUES = {"empty", "empty_like", "new_empty", "empty_strided"}
#: Initializers that do not check for meta tensors: some of torch before 2.13.
_UNASKING = {name for name in ("orthogonal_", "sparse_") if "is_meta" not in getattr(nn.init, name).__code__.co_names}
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # torch declares a plain attribute
_NO_WRITE = {"requires_grad_", "share_memory_", "rename_", "detach_"}
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod"))}


@contextmanager
def meta_init() -> Iterator[None]:
    """Build modules in the block on the meta device: their parameters have shapes and dtypes, and no memory."""
    original = nn.Module.register_parameter
    deepcopy: Any = nn.Parameter.__deepcopy__
    recorder = _Recorder()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        before = module._parameters.get(name)
        original(module, name, parameter)
        if parameter is not None:
            if (
                is_cut(parameter)
                and before is not None
                and before.shape == parameter.shape
                and hasattr(before, INITIAL)
            ):
                setattr(parameter, INITIAL, list(getattr(before, INITIAL)))  # the same values, cut over ranks
            module._parameters[name] = recorder.registered(parameter)

    def copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        return recorder.copied(parameter, deepcopy(parameter, memo))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign, assignment]
    try:
        with recorder, warnings.catch_warnings():
            # torch warns that the copy is a no-op, but here it is recorded.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter in the checkpoint", UserWarning)
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether ranks hold parts of `parameter`: it is a DTensor."""
    return hasattr(parameter, "placements")


def has_no_values(module: nn.Module) -> bool:
    """Whether any parameter of `module` was built under `meta_init` and is not initialized yet."""
    return any(parameter.is_meta for parameter in module.parameters())


@define
class _Operation:
    """A recorded in-place operation on a parameter, with its other arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    #: The option that the parameter was passed as; None if it was the first argument.
    passed_as: str | None
    #: Whether it can be repeated on another tensor of that shape.
    repeatable: bool
    #: Whether it was called in the module's own ``reset_parameters``.
    in_reset: bool

    def __call__(self, tensor: torch.Tensor) -> None:
        if self.passed_as is None:
            self.function(tensor, *self.arguments, **self.options)
        else:
            self.function(*self.arguments, **self.options | {self.passed_as: tensor})


class _Recorder(TorchFunctionMode):
    """Records in-place operations on parameters; see [Note: recorded initialization]."""

    def __init__(self) -> None:
        super().__init__()
        #: Storages of ``torch.empty`` that were not written to yet, by address.
        self._untouched: dict[int, Any] = {}
        #: Meta parameters by the address of their storage.
        self._parameters: dict[int, nn.Parameter] = {}
        #: Parameters that were passed to register_parameter, and the meta parameters that replaced them.
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], int, nn.Parameter]] = {}
        #: The frame of the last recorded call of one of `_UNASKING`.
        self._initializing: FrameType | None = None

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter to register for `parameter`: a meta parameter if it is not initialized yet."""
        known = self._replaced.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[2]
        address = _address(parameter)
        if parameter.is_meta:
            empty = parameter
        elif self._untouched.pop(address, None) is None:
            return parameter
        else:
            empty = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            self._replaced[id(parameter)] = (weakref.ref(parameter), address, empty)
        if not hasattr(empty, INITIAL):
            setattr(empty, INITIAL, [])
        self._parameters[_address(empty)] = empty
        return empty

    def copied(self, parameter: nn.Parameter, copy: nn.Parameter) -> nn.Parameter:
        """Return `copy`, with the operations that were recorded for `parameter`."""
        if copy is not parameter and copy.is_meta and not hasattr(copy, INITIAL):
            setattr(copy, INITIAL, list(getattr(parameter, INITIAL, ())))
            self._parameters[_address(copy)] = copy
        return copy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE)
        if writes or "out" in options or name == "numpy":
            self._written(func, args, options)
        if func == _IS_META:
            self._checked_for_meta(args[0])
        result = func(*args, **options)
        if name in _WITHOUT_VALUES and isinstance(result, torch.Tensor) and not result.is_meta:
            self._untouched[_address(result)] = result.untyped_storage()
        return result

    def _written(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = next((name for name in ("out", "tensor", "input") if name in options), None)
        target = options[named] if named is not None else next(iter(arguments), None)
        if not isinstance(target, torch.Tensor):
            return
        address = _address(target)
        self._untouched.pop(address, None)
        parameter = self._parameters.get(address)
        if parameter is None:
            parameter = self._replacement_at(address)
        if parameter is None or self._in_initializer(parameter):
            return
        rest = arguments if named is not None else arguments[1:]
        others = {name: value for name, value in options.items() if name != named}
        whole = (target.shape, target.stride(), target.storage_offset()) == (parameter.shape, parameter.stride(), 0)
        known = not any(isinstance(value, torch.Tensor) and value.is_meta for value in (*rest, *others.values()))
        operation = _Operation(function, rest, others, named, whole and known, _in_reset_of(parameter))
        if not (operation.repeatable or operation.in_reset):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is written to in a way that cannot be recorded "
                f"({getattr(function, '__name__', function)}), and the model is built on the meta device",
                expected="whole parameters filled from numbers or tensors that have values",
                do="do it in reset_parameters of the module that has the parameter",
            )
        getattr(parameter, INITIAL).append(operation)

    def _checked_for_meta(self, target: torch.Tensor) -> None:
        """Record the call of an initializer of torch that does nothing to meta tensors."""
        frame = sys._getframe(2)
        parameter = self._parameters.get(_address(target))
        known = frame.f_globals.get("__name__") == nn.init.__name__ and hasattr(nn.init, frame.f_code.co_name)
        if known and parameter is not None:
            self._called(frame, target, parameter)

    def _in_initializer(self, parameter: nn.Parameter) -> bool:
        """Whether one of `_UNASKING` is writing to `parameter`; record its call once, instead of its writes."""
        frame: FrameType | None = sys._getframe(3) if _UNASKING else None
        while frame is not None:
            if frame.f_code.co_name in _UNASKING and frame.f_globals.get("__name__") == nn.init.__name__:
                if frame is not self._initializing:
                    self._initializing = frame
                    self._called(frame, frame.f_locals["tensor"], parameter)
                return True
            frame = frame.f_back
        return False

    def _called(self, frame: FrameType, target: torch.Tensor, parameter: nn.Parameter) -> None:
        """Record the call of torch's initializer in `frame`, for `target`."""
        function, code = getattr(nn.init, frame.f_code.co_name), frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        options = {name: frame.f_locals[name] for name in names if frame.f_locals[name] is not target}
        passed_as = next(name for name in names if frame.f_locals[name] is target)
        whole = target.shape == parameter.shape
        getattr(parameter, INITIAL).append(_Operation(function, (), options, passed_as, whole, _in_reset_of(parameter)))

    def _replacement_at(self, address: int) -> nn.Parameter | None:
        """Return the meta parameter for an original one at `address`, to which code may still write."""
        for original, where, empty in self._replaced.values():
            if where == address and original() is not None:
                return empty
        return None


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return 0


def _in_reset_of(parameter: nn.Parameter) -> bool:
    """Whether the caller runs inside ``reset_parameters`` of the module that has `parameter`."""
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in RESETS else None
        if isinstance(owner, nn.Module) and any(own is parameter for own in owner._parameters.values()):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
