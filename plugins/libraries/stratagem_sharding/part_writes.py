"""Let hooks write into parts of a sharded tensor (``weight.grad[0] = 0``) and read it, as they do a whole one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, ref

import torch
from attrs import define
from torch import overrides
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode

from stratagem.errors import ConfigError
from stratagem_sharding.shards import read

if TYPE_CHECKING:
    from stratagem_sharding.unit_order import UnitOrder

#: What returns a view of a whole tensor; of a sharded one it may be a copy.
_VIEWS: Final = {
    "chunk", "detach", "diagonal", "expand", "flatten", "movedim", "narrow", "permute", "reshape", "select", "split",
    "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as",
}  # fmt: skip
_VIEW_PROPERTIES: Final = {vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH", "data")}
#: Parts of messages of torch about shards.
_SIGNS: Final = ("DTensor", "Sharding propagation failed", "sharded dimension", "_local_tensor")
#: What torch has for whole tensors only.
_READS: Final = {"tolist", "numpy", "__array__", "__format__", "allclose", "unique", "nonzero"}
#: Drawn for a shard, numbers would not be those of one process, and with one seed those of all shards the same.
_RANDOM: Final = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
}  # fmt: skip


@define(eq=False)
class _Part:
    """What ``whole[index]`` returned, or a view of it or of `whole`."""

    tensor: ReferenceType[DTensor]
    whole: DTensor
    #: None for a view that shares memory with `whole`.
    index: Any = None
    #: What is written into it would be lost.
    is_copy: bool = False


class PartWrites(TorchFunctionMode):
    """Within, what is written into ``tensor[index]`` gets into the shards of `tensor`.

    Torch gathers ``tensor[index]`` into a new tensor: what is written into that would be lost. Each rank writes its
    part of the value, which all of them have, so nothing is sent; all ranks do it.

    Args:
        order: returns what compares the reads of ranks, once a model is sharded.

    Raises:
        ConfigError: something else is written into that torch gathered, such as ``tensor.narrow(0, 0, 2)``.
    """

    def __init__(self, order: Callable[[], UnitOrder | None]) -> None:
        super().__init__()
        self._order = order
        self._reads: list[AbstractContextManager[None]] = []
        self._parts: list[_Part] = []

    def __enter__(self) -> PartWrites:
        order = self._order()
        self._reads.append(contextlib.nullcontext() if order is None else order.compared(self, reads=True))
        self._reads[-1].__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:  # noqa: PYI036
        self._parts.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._reads.pop().__exit__(*raised)
        error = raised[1]
        if isinstance(error, RuntimeError | AttributeError) and any(sign in str(error) for sign in _SIGNS):
            raise ConfigError(
                f"a hook uses sharded weights as torch refuses: {str(error).partition(chr(10))[0]}",
                expected="modules that are called in a step, which gathers their weights, or tensor.full_tensor()",
                do="move the call to validation_step or another step, or read tensor.full_tensor() on all ranks",
            ) from error

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; read a part of a sharded tensor, or write what it changes into the shards."""
        options, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else options.get("tensor")  # as `torch.nn.init` names it
        if isinstance(first, DTensor):
            if func is torch.Tensor.__setitem__:
                self._write(first, _whole(args[1]), _whole(args[2]))
                return self._spread([first])
            if func is torch.Tensor.__getitem__:
                return self._read(first, _whole(args[1]))
            if name == "__set__" and isinstance(args[1], DTensor):
                raise ConfigError(
                    "the data of a sharded tensor is set in a hook", expected="a change in place",
                    do="call tensor.copy_(value)",
                )  # fmt: skip
            if name in _READS:
                return func(*_whole(args), **options)
            if name in _VIEWS or func in _VIEW_PROPERTIES:
                return self._view(func, first, args[1:], options)
            is_in_place = name.endswith("_") and not name.endswith("__")  # not an operator, such as __eq__
            is_random = name in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init"
            if is_random or (is_in_place and any(_is_whole(each) for each in (*args[1:], *options.values()))):
                return self._change_whole(func, first, args[1:], options)
        result = func(*args, **options)
        several = first if name.startswith("_foreach") and name.endswith("_") else ()
        changed = (*(several or ()), options.get("out"), first if result is first else None)
        self._spread([each for each in changed if isinstance(each, DTensor)])
        return result

    def _change_whole(self, func: Any, tensor: DTensor, args: tuple[Any, ...], options: dict[str, Any]) -> DTensor:
        """Change `tensor` by a whole one (``tensor.copy_(value)``), which torch refuses, or by random numbers."""
        options = {name: _whole(value) for name, value in options.items() if value is not tensor}
        changed = func(_whole(tensor.detach()).clone(), *_whole(args), **options)
        self._write(tensor, ..., changed)
        self._spread([tensor])
        return tensor

    def _read(self, whole: DTensor, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        part = _replicated(read(whole)[index].clone(), whole)
        if all(isinstance(each, int | slice | None) or each is ... for each in parts):  # else torch copies
            self._parts.append(_Part(ref(part), whole, index))
        return part

    def _view(self, func: Any, of: DTensor, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            views = func(of, *args, **options)
        except RuntimeError:  # torch has none, such as of shards that differ in size
            views = _replicated(func(read(of), *args, **options), of)
        self._note(of, views)
        return views

    def _note(self, of: DTensor, views: Any) -> None:
        memory = _memory(of)
        for view in views if isinstance(views, tuple | list) else [views]:
            if isinstance(view, DTensor) and view is not of:
                is_copy = _memory(view) != memory
                if is_copy or self._of(of) is not None:
                    self._parts.append(_Part(ref(view), of, is_copy=is_copy))

    def _write(self, whole: DTensor, index: Any, value: Any) -> None:
        with torch.no_grad():
            chosen = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
            values = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
            chosen[index], values[index] = True, value
            mesh, placements = whole.device_mesh, whole.placements
            mine, new = (distribute_tensor(each, mesh, placements, src_data_rank=None) for each in (chosen, values))
            whole.to_local().copy_(torch.where(mine.to_local(), new.to_local(), whole.to_local()))

    def _spread(self, changed: list[DTensor]) -> None:
        """Write what each of `changed` is now into what it is a part of, and let other parts know."""
        self._parts = [part for part in self._parts if part.tensor() is not None]
        roots = []
        for each in changed:
            tensor = each
            while (part := self._of(tensor)) is not None:
                if part.is_copy:
                    raise ConfigError(
                        "a hook writes into a part of a sharded tensor that torch has gathered",
                        expected="tensor[index] = value, or tensor[index].mul_(value) and its like",
                        do="write into the tensor by an index of numbers and slices",
                    )  # fmt: skip
                if part.index is not None:
                    self._write(part.whole, part.index, tensor.full_tensor())
                tensor = part.whole
            roots.append(tensor)
        for root in roots:
            self._read_again(root)

    def _read_again(self, whole: DTensor) -> None:
        for part in self._parts:
            tensor = part.tensor()
            if part.whole is whole and part.index is not None and tensor is not None:
                with torch.no_grad():
                    tensor.to_local().copy_(whole.full_tensor()[part.index])
                self._read_again(tensor)

    def _of(self, tensor: DTensor) -> _Part | None:
        return next((part for part in self._parts if part.tensor() is tensor), None)


def _is_step() -> bool:
    """Whether a step runs, rather than a hook within it."""
    modes: list[Any] = overrides._get_current_function_mode_stack()
    return bool(_gathered) and not any(isinstance(mode, PartWrites) for mode in modes)


def _set_item(tensor: DTensor, index: Any, value: Any) -> None:
    if _is_step() and _memory(tensor[index]) != _memory(tensor):
        raise _lost_in_step("a part of a sharded weight")
    torch.Tensor.__setitem__(tensor, index, value)


def _noting(view: Callable[..., Any]) -> Callable[..., Any]:
    """Return `view`, which notes what a step without gradients may write into: gathered parts of `tensor`."""

    @functools.wraps(view)
    def noted(tensor: DTensor, *args: Any, **options: Any) -> Any:
        views = view(tensor, *args, **options)
        if not torch.is_grad_enabled() and _is_step():
            parts = views if isinstance(views, tuple | list) else [views]
            _gathered[-1].extend((part, part._version) for part in parts if _memory(part) != _memory(tensor))
        return views

    return noted


@contextlib.contextmanager
def without_lost_writes() -> Iterator[None]:
    """Within a step: refuse what is written into parts of sharded weights that torch has gathered."""
    _gathered.append([])
    try:
        yield
        if any(part._version != version for part, version in _gathered[-1]):
            raise _lost_in_step("a part of a sharded weight")
    finally:
        _gathered.pop()


def _set_data(tensor: DTensor, value: Any) -> None:
    if _is_step() and not all(placement.is_replicate() for placement in tensor.placements):
        raise _lost_in_step(".data of a sharded weight")
    _DATA.__set__(tensor, value)


def _lost_in_step(what: str) -> ConfigError:
    return ConfigError(
        f"training_step wrote into {what}, which would be lost",
        expected="writes into whole weights (weight.lerp_(...))", do="write so, or in on_train_batch_end",
    )  # fmt: skip


# Torch would write into a tensor that it has gathered, or into no shard, without an error message.
_DATA: Any = vars(torch._C.TensorBase)["data"]
_of_class: Any = DTensor
_of_class.__setitem__, _of_class.data = _set_item, property(_DATA.__get__, _set_data)
for _name in ("__getitem__", "chunk", "narrow", "select", "split", "unbind"):
    setattr(_of_class, _name, _noting(getattr(torch.Tensor, _name)))
#: For each step that runs, parts that were gathered, and their versions.
_gathered: list[list[tuple[torch.Tensor, int]]] = []


def _memory(tensor: Any) -> int:
    return int(tensor._local_tensor.untyped_storage().data_ptr())


def _replicated(value: Any, like: DTensor) -> Any:
    """Return a tensor that all ranks have, or each of several, for operations with `like`."""
    if isinstance(value, tuple | list):
        return tuple(_replicated(each, like) for each in value)
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_whole(value: Any) -> bool:
    """Whether `value` is a tensor without shards, or has one."""
    if isinstance(value, tuple | list):
        return any(_is_whole(each) for each in value)
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 0


def _whole(value: Any) -> Any:
    """Return an index or a value without shards."""
    if isinstance(value, tuple | list):
        return type(value)(_whole(each) for each in value)
    return read(value) if isinstance(value, DTensor) else value
