"""Find operations that make the host wait for a GPU, on a machine without one.

    with recording() as recorder:
        trainer = Trainer(accelerator=StandIn(), ...)
        trainer.fit(module, loader)
    print(recorder.found)

[Note: the stand-in]
A training step should only enqueue work: ``loss.item()``, ``if flag:`` on a GPU's tensor, or a blocking copy to or from
the GPU makes the host wait until the queue is empty, and then the GPU wait for the host. Here ``cpu:0`` represents the
GPU, and ``cpu`` the host. `StandIn` is an accelerator whose device is ``cpu:0``. A recorder tracks every tensor on that
device (``to``, a factory with ``device=``) and all results computed from it, through forward, backward, optimizers,
DDP's buckets and the callbacks of futures. ``tensor.device`` returns the represented device.

It records: numbers that the host reads (``item``, ``float``, ``bool``, ``tolist``, ``numpy``), operations whose result
has a size that depends on values (``nonzero``, a boolean mask as index, ``unique``), and copies between host and device
without ``non_blocking=True``, such as ``torch.tensor([1, 2], device=device)``.

It does not detect: operations on tensors that are older than the recorder, C++ code that reads memory directly, and
functions of CUDA only (``torch.cuda.synchronize``, events). On a GPU ``torch.cuda.set_sync_debug_mode("error")`` finds
more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import stratagem as sg
from stratagem.api.capabilities import DEVICE_CPU

_HOST, _DEVICE = torch.device("cpu"), torch.device("cpu", 0)
#: Operations for which the host waits, by schema: they return a number, or a shape that depends on values.
_WAITS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "is_nonzero", "_unique", "_unique2",
        "unique_dim", "unique_consecutive", "bincount", "_linalg_check_errors", "_linalg_svd", "_linalg_eigh",
        "linalg_eig", "linalg_lstsq",
    )
}  # fmt: skip
#: Functions that make a tensor without another one.
_FACTORIES = (
    "empty", "zeros", "ones", "full", "eye", "arange", "linspace", "rand", "randn", "randint", "randperm", "from_numpy",
    "frombuffer",
)  # fmt: skip
#: Number of entries at which those of deleted tensors are removed.
_MANY = 100_000


@frozen
class Synchronization:
    """An operation for which the host would wait for a GPU."""

    #: The operation: "item", "nonzero", "copy to the device" ...
    operation: str
    #: The calling lines, innermost first, without those of torch.
    where: tuple[str, ...]
    #: `Recorder.step` at the time.
    step: int

    def __str__(self) -> str:
        return f"{self.operation} in {' < '.join(self.where)}"


@define(eq=False)
class Recorder:
    """What was found so far; see [Note: the stand-in]."""

    found: list[Synchronization] = field(factory=list)
    #: Which step of training it is: for the caller to count.
    step: int = 0

    _kinds: dict[int, tuple[StorageWeakRef, str]] = field(init=False, factory=dict, repr=False)
    #: Per thread: whether it is watched, and how many factories that Python called are at work.
    _local: Any = field(init=False, factory=threading.local, repr=False)

    # --- Which tensors are the device's ----------------------------------------------------------------------------

    def on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on the stand-in device."""
        return self._kind(tensor) == "device"

    def _kind(self, tensor: Tensor) -> str:
        """Return "device" or "host"; "" where that is unknown: torch's own buffers, and what is older than this."""
        entry = self._kinds.get(_memory(tensor)._cdata)
        return "" if entry is None else entry[1]

    def _mark(self, tensor: Tensor, kind: str) -> None:
        if len(self._kinds) > _MANY:
            self._kinds = {key: entry for key, entry in self._kinds.items() if not entry[0].expired()}
        memory = _memory(tensor)
        # The weak reference keeps the address from being given to another storage.
        self._kinds[memory._cdata] = StorageWeakRef(memory), kind

    def _note(self, operation: str) -> None:
        self.found.append(Synchronization(operation, _lines(), self.step))

    # --- What torch dispatches -------------------------------------------------------------------------------------

    def _dispatched(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = function(*arguments, **options)
        name = function._schema.name
        given = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        if any(map(self.on_device, given)):
            self._look_for_waiting(name, arguments, options)
        if name == "aten::copy_":
            self._copied(*arguments, **options)
        wanted = None if name == "aten::_to_copy" else options.get("device")  # `_to` knows better
        kinds = {self._kind(each) for each in given}
        if (wanted is not None and wanted.index == 0) or (wanted is None and "device" in kinds):
            kind = "device"
        elif kinds == {"host"} or (not given and getattr(self._local, "calls", 0) > 0):
            kind = "host"
        else:
            return result  # C++ names a device by its type alone
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and not self._kind(each):
                self._mark(each, kind)
        return result

    def _look_for_waiting(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name in _WAITS or (name == "aten::repeat_interleave" and options.get("output_size") is None):
            self._note(name.removeprefix("aten::").replace("_local_scalar_dense", "item"))
        elif name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            indices = [each for each in arguments[1] if each is not None]
            fills = name != "aten::index" and len(indices) == 1 and arguments[2].numel() == 1
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices) and not fills:
                self._note("nonzero (a mask as index)")
            if not all(map(self.on_device, indices)):
                self._note("copy to the device (an index)")

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        if {self._kind(target), self._kind(source)} == {"device", "host"} and not non_blocking:
            self._note(f"copy to the {self._kind(target)}")

    # --- What Python calls -----------------------------------------------------------------------------------------

    def _to(self, original: Callable[..., Tensor], tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        other = next((each for each in (*arguments, *options.values()) if isinstance(each, Tensor)), None)
        copy = options.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*arguments, **options)
        if other is not None:
            device = other.device
        kind = self._kind(tensor) or "host"
        wanted = kind if device is None else "device" if device.index == 0 else "host"
        result: Tensor = self._quietly(
            original, tensor, dtype=dtype or tensor.dtype, copy=copy or (wanted != kind and not _is_wrapper(tensor)),
            memory_format=memory_format or torch.preserve_format,
        )  # fmt: skip
        if wanted != kind:
            if not non_blocking:
                self._note(f"copy to the {wanted}")
            self._mark(result, wanted)
        return result

    def _read(self, operation: str, original: Callable[..., Any], tensor: Tensor, *arguments: Any) -> Any:
        if self.on_device(tensor):
            self._note(operation)
        return self._quietly(original, tensor, *arguments)

    def _made(self, original: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Return a tensor made of Python's numbers (``torch.tensor``, ``new_tensor``) on the device it is for."""
        device, of = options.get("device"), next(iter(arguments), None)
        result: Tensor = self._quietly(original, *arguments, **options)
        if isinstance(of, Tensor) and device is None:
            wanted = self._kind(of) or "host"
        else:
            wanted = "device" if device is not None and torch.device(device).index == 0 else "host"
        if wanted == "device" and self._kind(result) != "device":
            self._note("copy to the device")
        self._mark(result, wanted)
        return result

    def _factory(self, original: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        self._local.calls = getattr(self._local, "calls", 0) + 1
        try:
            return original(*arguments, **options)
        finally:
            self._local.calls -= 1

    def _quietly(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `function` without recording, since the caller has recorded it."""
        found, self.found = self.found, []
        try:
            return function(*arguments, **options)
        finally:
            self.found = found

    def _with_mode(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any) -> Any:
            with self._watching():
                return callback(*arguments)

        return within

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Track what this thread dispatches, unless that is done already."""
        if getattr(self._local, "watched", False):
            yield
            return
        self._local.watched = True
        try:
            with _Mode(self):
                yield
        finally:
            self._local.watched = False


class _Mode(TorchDispatchMode):
    """Passes the operations that one thread dispatches to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: what it does with its shards comes next
        if any(each not in (Tensor, torch.nn.Parameter) for each in types):
            return func(*args, **(kwargs or {}))  # shapes without values
        return self.recorder._dispatched(func, args, kwargs or {})


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Within: record operations for which the host would wait for a GPU; see [Note: the stand-in]. Cannot be nested."""
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        replace = functools.partial(_replaced, stack)
        get_device = Tensor.device.__get__
        replace(Tensor, "device", property(lambda each: _DEVICE if recorder.on_device(each) else get_device(each)))
        replace(Tensor, "to", _method(recorder._to, Tensor.to))
        replace(Tensor, "cpu", _method(recorder._to, Tensor.to, _HOST))
        for name in ("numpy", "tolist"):
            replace(Tensor, name, _method(functools.partial(recorder._read, name), getattr(Tensor, name)))
        replace(Tensor, "new_tensor", _method(recorder._made, Tensor.new_tensor))
        for name in ("tensor", "as_tensor"):
            replace(torch, name, functools.partial(recorder._made, getattr(torch, name)))
        for name in _FACTORIES:
            replace(torch, name, functools.partial(recorder._factory, getattr(torch, name)))
        for name in ("then", "add_done_callback"):
            original = getattr(torch._C.Future, name)
            replace(torch._C.Future, name, _wrapping(original, recorder))
        for module in (torch.nn.utils.clip_grad, sys.modules[torch.optim.Optimizer.__module__]):
            grouped = module._group_tensors_by_device_and_dtype
            replace(module, grouped.__name__, functools.partial(_by_device, grouped))
        for module, name in _of_fsdp():
            replace(module, name, lambda _: _DEVICE)
        stack.enter_context(recorder._watching())
        yield recorder


def _by_device(original: Callable[..., Any], lists: Any, *arguments: Any) -> Any:
    """Return the result of `original`, with the devices that ``tensor.device`` returns."""
    groups = original(lists, *arguments)
    return {(tensors[0][0].device, dtype): (tensors, *rest) for (_, dtype), (tensors, *rest) in groups.items()}


def _of_fsdp() -> list[tuple[Any, str]]:
    """Return the functions of FSDP that return a mesh's device, which has no index."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp._fully_shard import _fully_shard

    return [(_fully_shard, "_get_device_from_mesh")]


def _replaced(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    own = name in vars(owner)
    stack.callback(setattr, owner, name, getattr(owner, name)) if own else stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _method(function: Callable[..., Any], *before: Any) -> Callable[..., Any]:
    """Return a method that calls ``function(original, self, ...)``; `before` is the original, then first arguments."""
    original, first = before[0], before[1:]

    def method(self: Tensor, *arguments: Any, **options: Any) -> Any:
        return function(original, self, *first, *arguments, **options)

    return method


def _wrapping(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def method(self: Any, callback: Callable[..., Any]) -> Any:
        return original(self, recorder._with_mode(callback))

    return method


def _is_wrapper(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass_type(type(tensor)))


def _memory(tensor: Tensor) -> Any:
    """Return the storage of `tensor`; of a wrapper, such as a DTensor, that of the first tensor within."""
    while _is_wrapper(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])  # type: ignore[attr-defined]
    return tensor.untyped_storage()


def _lines() -> tuple[str, ...]:
    frame, lines = sys._getframe(1), list[str]()
    while frame is not None and len(lines) < 3:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "contextlib", "functools", "pluggy") and module != __name__:
            lines.append(f"{module}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


# --- Training steps --------------------------------------------------------------------------------------------------


@define(eq=False, kw_only=True)
class StandIn(sg.Accelerator):
    """The CPU under the name ``cpu:0``; see [Note: the stand-in]."""

    indexed = False
    capabilities = sg.Capabilities(provides={DEVICE_CPU})

    def count(self) -> int:
        return 1

    def device(self, index: int) -> torch.device:
        return _DEVICE


class _Steps(sg.Callback):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @sg.hookimpl(trylast=True)
    def on_train_batch_end(self) -> None:
        self.recorder.step += 1


def synchronizations_per_step(
    module: sg.Module, loader: Any, *, warm_up: int = 4, **arguments: Any
) -> list[list[Synchronization]]:
    """Train `module` on the stand-in device, and return what was found in each batch after the first `warm_up`.

    Called on all ranks, in processes that were started already (`run_in_processes`). Between two batches belongs to the
    second one; what comes after the last batch (the end of the epoch) is left out.

    Args:
        module: what is trained.
        loader: its batches: this process's share, unless the trainer is to share them.
        warm_up: batches in which an engine may lay out its buckets, and hooks may send whole gradients.
        arguments: the `Trainer`'s.
    """
    with recording() as recorder:
        callbacks = [*arguments.pop("callbacks", ()), _Steps(recorder)]
        trainer = sg.Trainer(**({"max_epochs": 1} | arguments), accelerator=StandIn(), callbacks=callbacks)
        trainer.fit(module, loader)
        trainer.close()
    return [[each for each in recorder.found if each.step == step] for step in range(warm_up, recorder.step)]
