"""Parameters that stage 3 has partitioned: steps get values, hooks shapes; what needs values in a hook is refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem_deepspeed.manual_writes import ManualWrites

_PROPERTIES: Final = vars(torch._C.TensorBase)
_SHAPES: Final = {
    Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.size, Tensor.__len__, Tensor.element_size,
    Tensor.stride, Tensor.is_contiguous, *(_PROPERTIES[name].__get__ for name in ("shape", "ndim", "nbytes")),
}  # fmt: skip
#: Properties that are values.
_VALUES: Final = {_PROPERTIES[name].__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_DATA: Final = {_PROPERTIES["data"].__get__, _PROPERTIES["data"].__set__}
_HARMLESS: Final = {
    "__get__", "__set__", "__hash__", "__repr__", "is_complex", "is_floating_point", "register_hook",
    "register_post_accumulate_grad_hook", "get_device",
}  # fmt: skip


class PartitionedReads(TorchFunctionMode):
    """Within, a program that asks a partitioned parameter for its shape gets the whole one.

    DeepSpeed has replaced the parameter by an empty tensor, whose norm is 0.

    Raises:
        ConfigError: the program computes with such a parameter.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it needs values that no rank has."""
        options, name = kwargs or {}, getattr(func, "__name__", "")
        found: Any = next(_partitioned((*args, *options.values())), None)
        if found is None or not _is_asked_by_program(name):
            return func(*args, **options)
        if func in _SHAPES:
            return _of_shape(func, found, *args[1:], **options)
        is_in_place = name.endswith("_") and not name.endswith("__") and args[:1] and args[0] is found
        if is_in_place or (name in _HARMLESS and func not in _VALUES):  # `ManualWrites` finds what is written
            return func(*args, **options)
        raise ConfigError(
            f"a hook computes with a parameter of shape {list(found.ds_shape)} that stage 3 has partitioned over the "
            "ranks",
            expected="gathered parameters",
            do="compute inside deepspeed.zero.GatheredParameters(parameters), on all ranks",
        )


def _of_shape(func: Callable[..., Any], parameter: Any, *args: Any, **options: Any) -> Any:
    return func(torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta"), *args, **options)


class _Listed(nn.Parameter):
    """A parameter that a step has listed: it is gathered when its value is needed."""

    ds_needs: Callable[[bool], None] = staticmethod(lambda _: None)  # of a copy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options, is_asked = kwargs or {}, _is_asked_by_program("")
        with torch._C.DisableTorchFunctionSubclass():
            found: Any = next(_partitioned((*args, *options.values())), None)
            if is_asked and found is not None and func in _SHAPES:
                return _of_shape(func, found, *args[1:], **options)
            if is_asked and (getattr(func, "__name__", "") not in _HARMLESS or func in _VALUES or func in _DATA):
                for each in pytree.tree_leaves((args, options)):
                    if isinstance(each, _Listed):
                        each.ds_needs(func in _DATA)
            return func(*args, **options)


class StepReads:
    """Gathers what a step reads of parameters that it lists, as in a penalty over `module.parameters()`.

    DeepSpeed itself gathers those that are attributes of a module (``other.weight``), the others are empty tensors.
    What is gathered stays so until the module that has read it is released.

    Args:
        root: the engine's module.
        writes: is told whose `.data` was read.
    """

    def __init__(self, root: Any, writes: ManualWrites | None) -> None:
        from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

        self._root, self._writes, self._listed = root, writes, list[tuple[Any, type]]()
        watch = self._watch

        class Parameters(ZeROOrderedDict):  # type: ignore[misc]
            def items(self) -> Any:
                found = super().items()
                if getattr(self, "_in_forward", False):
                    if not _is_asked_by_program("items"):  # functional_call may have put other tensors here
                        return [(name, each) for name, each in found if each is None or hasattr(each, "ds_id")]
                    for _, each in found:
                        watch(each)
                return found

        for part in root.modules():
            part._parameters.__class__ = Parameters

    def _watch(self, parameter: Any) -> None:
        if hasattr(parameter, "ds_id") and not isinstance(parameter, _Listed):
            self._listed.append((parameter, type(parameter)))
            parameter.__class__, parameter.ds_needs = _Listed, functools.partial(self._gather, parameter)

    def _gather(self, parameter: Any, is_data: bool) -> None:
        """Gather a `parameter` for the module that computes; `is_data`: it may be written without a version."""
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
        from deepspeed.runtime.zero.partition_parameters import register_external_parameter

        if parameter in (pending := self._root.ds_inflight_param_registry):
            pending.pop(parameter).wait()
        if parameter.numel() == 0 < parameter.ds_numel:
            if self._writes is not None:
                self._writes.visit(f"a parameter of shape {list(parameter.ds_shape)} that the step reads")
            register_external_parameter(FWD_MODULE_STACK[-1], parameter)
            parameter.all_gather()
            parameter.ds_active_sub_modules.add(FWD_MODULE_STACK[-1].ds_id)
        if is_data and self._writes is not None:
            self._writes.read.add(id(parameter))

    def end(self) -> None:
        """Forget what the step has listed."""
        for each, cls in self._listed:
            each.__class__ = cls
            del each.ds_needs
        self._listed.clear()


def _partitioned(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from _partitioned(each)
        elif isinstance(each, nn.Parameter) and each.numel() == 0 < getattr(each, "ds_numel", 0):
            yield each


def _is_asked_by_program(name: str) -> bool:
    """Whether the call comes from the user's program. Plugins and DeepSpeed know what they read; `state_dict` warns."""
    frame: Any = sys._getframe(2)
    if name == "detach" and frame.f_globals["__name__"] == nn.modules.module.__name__:
        return False
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "torch":
        frame = frame.f_back
    package: str = frame.f_globals["__name__"].partition(".")[0]
    return package != "deepspeed" and not package.startswith("stratagem")
