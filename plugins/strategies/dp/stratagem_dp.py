"""One process for all devices of a node: each runs a copy of the model on a part of the batch (`dp`, and `ddp2` for
several nodes).

[Note: parts]
A batch is cut into *pieces*, one for each device. A *part* is one piece's step: a copy of the user's module runs it, in
a thread of its own. Copies share the parameters (on the CPU) or are copied from them through autograd (elsewhere), so
one backward reaches the parameters from all parts. A copy lives for one step. What the parts return is joined on the
first device, and only there the module's ``_end`` methods run, on the module itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    LOCAL_STEPS,
    MULTI_PROCESS,
    NO_SYNC,
    Capabilities,
    Strategy,
    hookimpl,
)
from stratagem.api.batches import move_batch
from stratagem.api.metric_values import combine, number
from stratagem.api.validators import duration, more_than, not_empty
from stratagem.distributed.process_group import TorchCollectives
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import Collectives, RunContext, World

_WITHIN_A_PROCESS = frozenset(
    {CLIP_BY_NORM, CLIP_BY_VALUE, CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, CUSTOM_STEP, FULL_STATE, NO_SYNC}
)


@define(eq=False, kw_only=True)
class DPStrategy(Strategy):
    """One process cuts each batch for the devices of its node, and joins what they return."""

    process_per_device = False
    capabilities = Capabilities(provides=_WITHIN_A_PROCESS)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        return _in_parts(module, run)


@define(eq=False, kw_only=True)
class DDP2Strategy(Strategy):
    """One process on each node cuts its batches for the node's devices; the gradients of the nodes are averaged."""

    #: Look for parameters that the loss does not reach: needed if there are any, costs a walk of the graph each step.
    find_unused_parameters: bool = False
    #: Gradients are views into the all-reduce buckets: saves a copy of them all; they cannot be detached in place.
    gradient_as_bucket_view: bool = False
    #: Larger buckets mean fewer messages, smaller ones overlap better with backward; megabytes, fractions allowed.
    bucket_cap_mb: float = field(default=25.0, validator=more_than(0))
    #: How long a node waits for the others before it gives up, in seconds or as a timedelta; by default
    #: 10 minutes over NCCL and 30 otherwise.
    timeout: timedelta | None = field(default=None, validator=duration)
    #: torch.distributed backend; by default the one that fits the device (nccl for CUDA, gloo for the CPU).
    process_group_backend: str | None = field(default=None, validator=not_empty)

    #: What DDP sends in a step without hooks, in bytes.
    _num_bytes: int = field(init=False, default=0)

    process_per_device = False
    capabilities = Capabilities(provides=_WITHIN_A_PROCESS | {GRADIENT_BUCKETS, LOCAL_STEPS, MULTI_PROCESS})

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta) and isinstance(self.timeout, int | float):
            self.timeout = timedelta(seconds=self.timeout)

    def join_timeout(self) -> timedelta | None:
        return self.timeout

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        backend = self.process_group_backend or run.backend
        return TorchCollectives.connect(world, run.device, backend=backend, timeout=run.join_timeout)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        parts = _in_parts(module, run)
        if run.stage != "train" or not any(parameter.requires_grad for parameter in parts.parameters()):
            run.collectives.replicate((*parts.parameters(), *parts.buffers()))
            return parts
        node = _Node(
            parts,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        reducer = run.bucket_reducer()
        if reducer is not None:
            reducer.serve(node)
        silent = reducer is not None  # hooks count by themselves
        self._num_bytes = 0 if silent else sum(p.nbytes for p in parts.parameters() if p.requires_grad)
        return node

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
        silent = stage == "train" and not sync and isinstance(run.model, _Node)
        return run.model.no_sync() if silent else None

    @hookimpl
    def backward(self, loss: Tensor, run: RunContext) -> bool:
        with _explaining_unused():
            run.differentiate(loss)
        if self._num_bytes and run.sync_gradients:
            run.collectives.traffic.add("all_reduce", self._num_bytes, run.world_size, sender="gradients")
        return True

    @hookimpl
    def on_validation_start(self, run: RunContext) -> None:
        if isinstance(run.model, _Node):
            assert run.module is not None, "it was wrapped"
            run.collectives.replicate(run.module.buffers())


# --- Between nodes -----------------------------------------------------------------------------------------------


class _Node(DistributedDataParallel):
    """DDP that leaves evaluation alone: without gradients there is nothing to say, and a node may have more batches."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        with _explaining_unused():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's


@contextlib.contextmanager
def _explaining_unused() -> Iterator[None]:
    """Say in one sentence what torch says in a page when a parameter got no gradient."""
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            raise
        raise ConfigError(
            "some parameters got no gradient in the last step, and the nodes wait for all of them",
            expected="a loss that every trainable parameter takes part in",
            do="set strategy.ddp2.find_unused_parameters to true, or freeze what is not trained",
        ) from error


# --- Within a node -----------------------------------------------------------------------------------------------


def _in_parts(module: nn.Module, run: RunContext) -> _Parts:
    """Place `module`, a `StepModule`, on the first device, and return what runs its steps in parts."""
    if len(run.devices) > 1:
        _check_copies(module, run)
    return _Parts(module.to(run.device), run.devices)


def _check_copies(module: Any, run: RunContext) -> None:
    """Refuse what would go on using the module itself when a copy of it runs."""
    compiled = [
        part
        for part in module.modules()
        if (part is module.module and module.compiles_steps)
        or hasattr(part, "_orig_mod")
        or part._compiled_call_impl is not None
    ]
    if compiled:
        raise ConfigError(
            f"{type(compiled[0]).__name__} is compiled, and {len(run.devices)} devices of one process run copies of it",
            expected="a module that is not",
            do="drop torch.compile, or choose a strategy with a process for each device",
        )
    if run.settings.activation_checkpointing is not None and run.stage == "train":
        raise ConfigError(
            f"activation_checkpointing is set, and {len(run.devices)} devices of one process run copies of the module",
            expected="it unset",
            do="use torch.utils.checkpoint in the module, or choose a strategy with a process for each device",
        )


class _Parts(nn.Module):
    """Runs each step in parts, one on each device; see [Note: parts]."""

    def __init__(self, steps: Any, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.steps, self.devices = steps, devices

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        pieces = _cut((arguments, options), len(self.devices))
        outputs = [self.steps.step(method, *arguments, **options)] if len(pieces) == 1 else self._run(method, pieces)
        if self.steps.has_end(method):
            return self.steps.end(method, _join(outputs, self.devices[0], torch.stack))
        if len(pieces) == 1:
            return outputs[0]
        return _join(outputs, self.devices[0], functools.partial(_mean, sizes=[piece.size for piece in pieces]))

    def _run(self, method: str, pieces: list[_Piece]) -> list[Any]:
        copies = _copies(self.steps, self.devices[: len(pieces)])
        journals = [_Journal(piece.size) for piece in pieces]
        for copy, journal in zip(copies, journals, strict=True):
            if callable(getattr(type(copy.module), "log", None)):
                copy.module.__dict__["log"] = journal
        check = _LossOfState(copies[0], method)
        outputs = _side_by_side(
            [functools.partial(_step, *each, method) for each in zip(copies, pieces, self.devices, strict=False)],
            self.devices,
        )
        check.complain()
        _publish(self.steps.module, journals, self.devices[0])
        return outputs


def _step(copy: Any, piece: _Piece, device: torch.device, method: str) -> Any:
    arguments, options = move_batch((piece.arguments, piece.options), device)
    return copy.step(method, *arguments, **options)


# --- Cutting a batch ---------------------------------------------------------------------------------------------


@frozen
class _Piece:
    """What one part gets of a step's arguments."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    #: Samples in it.
    size: int


def _cut(given: tuple[tuple[Any, ...], dict[str, Any]], count: int) -> list[_Piece]:
    """Return at most `count` pieces of what was given to a step: as even as `torch.chunk` makes them."""
    if count == 1:
        return [_Piece(given[0], given[1], size=1)]
    size = _batch_size(given, count)
    step = max(1, -(-size // count))
    bounds = [slice(start, min(start + step, size)) for start in range(0, max(1, size), step)]
    parts = [_part_of(given, size, bound) for bound in bounds]
    return [
        _Piece(arguments, options, bound.stop - bound.start)
        for (arguments, options), bound in zip(parts, bounds, strict=True)
    ]


def _batch_size(batch: Any, count: int) -> int:
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()))
    if not sizes:
        raise ConfigError(
            f"a batch has no tensor with a dimension to cut for {count} devices",
            expected="one",
            do="set devices to 1, or choose a strategy with a process for each device",
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"a batch to be cut for {count} devices has tensors of {' and of '.join(map(str, sizes))} in dimension 0",
            expected="the same number of samples in all of them",
            do="keep what does not belong to samples in a buffer of the module",
        )
    return sizes[0]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, list | tuple | dict):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(item)


def _part_of(batch: Any, size: int, bound: slice) -> Any:
    """Return the samples in `bound`, out of `size`; what belongs to no sample as it is."""
    if isinstance(batch, Tensor):
        return batch[bound] if batch.dim() else batch
    if isinstance(batch, dict):
        return type(batch)({key: _part_of(item, size, bound) for key, item in batch.items()})
    if not isinstance(batch, list | tuple):
        return batch
    if hasattr(batch, "_fields"):
        return type(batch)(*(_part_of(item, size, bound) for item in batch))
    if len(batch) == size and next(_tensors(batch), None) is None:
        return batch[bound]  # the samples' names, say: a loader collates them into a list
    return type(batch)([_part_of(item, size, bound) for item in batch])


# --- Joining outputs ---------------------------------------------------------------------------------------------


def _join(outputs: list[Any], device: torch.device, merge: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return what the parts returned as one value on `device`; `merge` makes one of numbers."""
    first = outputs[0]
    _check_alike(outputs)
    if isinstance(first, Tensor):
        return _join_tensors([output.to(device) for output in outputs], merge)
    if isinstance(first, int | float):
        return merge([torch.as_tensor(output, device=device) for output in outputs])
    if isinstance(first, dict):
        return type(first)({key: _join([output[key] for output in outputs], device, merge) for key in first})
    if isinstance(first, tuple):
        items = [_join(list(items), device, merge) for items in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, list):
        return [move_batch(item, device) for output in outputs for item in output]
    return None if first is None else outputs


def _join_tensors(tensors: list[Tensor], merge: Callable[[list[Tensor]], Tensor]) -> Tensor:
    if not tensors[0].dim():
        return merge(tensors)
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"parts of a batch returned tensors of the shapes {shapes}",
            expected="the same but for dimension 0, where they are joined",
            do="pad them alike, or return them in a list",
        )
    return torch.cat(tensors)


def _check_alike(outputs: list[Any]) -> None:
    """Refuse outputs of different build: a part of one kind must have a counterpart in the others."""

    def build(output: Any) -> str:
        if isinstance(output, dict):
            return f"a dictionary of {', '.join(sorted(map(repr, output)))}"
        if isinstance(output, tuple):
            return f"a tuple of {len(output)}"
        if isinstance(output, Tensor):
            return "a tensor" if output.dim() else "a tensor without dimensions"
        return type(output).__name__

    builds = list(dict.fromkeys(map(build, outputs)))
    if len(builds) > 1:
        raise ConfigError(f"parts of a batch returned {' and '.join(builds)}", expected="the same from all of them")


def _mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    """Return the mean over samples, given the means of parts of these `sizes`."""
    weighted = [value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True)]
    return functools.reduce(torch.add, weighted)


# --- Copies ------------------------------------------------------------------------------------------------------


def _copies(steps: nn.Module, devices: Sequence[torch.device]) -> list[Any]:
    """Return a copy of `steps` on each device, whose gradients reach the parameters of `steps`.

    Buffers of the first copy are those of `steps`; the others have their own.
    """
    if devices[0].type == "cpu":
        copies = [_shallow_copy(steps, own_buffers=index > 0) for index in range(len(devices))]
    else:
        copies = nn.parallel.replicate(steps, list(devices), detach=not torch.is_grad_enabled())
    for copy in copies:
        for module in list(copy.modules()):
            # torch hides them, since they are no leaves: a step that sums over `parameters()` would find none.
            module._parameters.update(getattr(module, "_former_parameters", {}))
            for name, child in module._modules.items():
                if _collects(child):
                    module._modules[name] = _NotInAPart(type(child).__name__)
    return list(copies)


def _shallow_copy(network: nn.Module, own_buffers: bool) -> nn.Module:
    """Return a copy of the tree of modules around the very same parameters."""
    originals = list(network.modules())
    copies: dict[nn.Module, nn.Module] = {module: module._replicate_for_data_parallel() for module in originals}
    for module, copy in copies.items():
        copy._parameters = dict(module._parameters)
        copy._modules = {name: None if child is None else copies[child] for name, child in module._modules.items()}
        if own_buffers:
            copy._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    return copies[network]


def _collects(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


class _NotInAPart(nn.Module):
    """Stands in a copy for an object that collects over batches: what it collected there would be lost."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.__dict__["name"] = name

    def forward(self, *_: Any, **__: Any) -> Any:
        raise _not_in_a_part(self.name)

    def __getattr__(self, _: str) -> Any:
        raise _not_in_a_part(self.name)


def _not_in_a_part(name: str) -> ConfigError:
    return ConfigError(
        f"a part of a batch used a {name}, which collects over batches",
        expected="the whole batch",
        do="use it in validation_step_end, or the end of whichever step it is",
    )


class _LossOfState:
    """Remembers what a copy holds, to tell what a step set on it and would lose."""

    def __init__(self, copy: Any, method: str) -> None:
        self.module, self.method = copy.module, "forward" if method == "__call__" else method
        self.attributes = dict(self.module.__dict__)
        self.buffers = [(module, dict(module._buffers)) for module in copy.modules()]

    def complain(self) -> None:
        """Raise if the step set a public attribute of the user's module, or a buffer of any."""
        absent = object()
        lost = [
            name
            for name, value in self.module.__dict__.items()
            if not name.startswith("_") and self.attributes.get(name, absent) is not value
        ]
        for module, before in self.buffers:
            lost += [name for name, value in module._buffers.items() if before.get(name, absent) is not value]
        if lost:
            raise ConfigError(
                f"{type(self.module).__name__}.{self.method} set {lost[0]} on a copy that lives for a part of a batch",
                expected="nothing to be kept there",
                do="change it in place, append to a list, or set it in the step's end or an event",
            )


# --- Threads -----------------------------------------------------------------------------------------------------


def _side_by_side(calls: list[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Return what the `calls` return, each made in a thread of its own under this thread's settings of torch.

    Raises the first call's error, once all have ended.
    """
    settings = _ThreadSettings(devices)
    outputs: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}

    def work(index: int) -> None:
        try:
            with settings.entered(index):
                outputs[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            error.add_note(f"in part {index + 1} of {len(calls)} of a batch, on {devices[index]}")
            errors[index] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, index)) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
        if devices[0].type == "cpu":  # parts would draw from one random generator, in another order each time
            thread.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return outputs


class _ThreadSettings:
    """What torch keeps for each thread by itself, as it is in the thread that makes this."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.inference, self.gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        kinds = dict.fromkeys(("cpu", devices[0].type))
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self.streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    @contextlib.contextmanager
    def entered(self, index: int) -> Iterator[None]:
        """Put them into force in the thread of part `index`."""
        with contextlib.ExitStack() as stack:
            stream = self.streams[index]
            if stream is not None:
                stack.enter_context(torch.cuda.device(self.devices[index]))
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.autocast.items():
                # All threads would share the copies that autocast remembers, and the first to end would drop them.
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield


# --- What parts log ----------------------------------------------------------------------------------------------


@define
class _Journal:
    """Stands for a module's `log` in one part, and keeps what is logged until all parts have ended."""

    #: Samples of the part.
    size: int
    entries: list[tuple[str, Any, dict[str, Any]]] = field(factory=list)

    def __call__(self, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, _NotInAPart) or _collects(value):
            raise _not_in_a_part(value.name if isinstance(value, _NotInAPart) else type(value).__name__)
        self.entries.append((name, value.detach() if isinstance(value, Tensor) else value, options))


def _publish(module: Any, journals: list[_Journal], device: torch.device) -> None:
    """Log in the whole batch's name what was logged in its parts, in the order of the first part that did."""
    calls: dict[tuple[str, int], list[tuple[Any, int, dict[str, Any]]]] = {}
    for journal in journals:
        times: Counter[str] = Counter()
        for name, value, options in journal.entries:
            moved = value.to(device) if isinstance(value, Tensor) else value
            size = journal.size if options.get("batch_size") is None else options["batch_size"]
            calls.setdefault((name, times[name]), []).append((moved, size, options))
            times[name] += 1
    for (name, _), entries in calls.items():
        values, sizes, (options, *_) = zip(*entries, strict=True)
        reduce_fx = options.get("reduce_fx", "mean")
        merged = [_merged(name, values, sizes, reduce_fx)] if _can_merge(values, reduce_fx) else values
        for value in merged:
            module.log(name, value, **options | {"batch_size": sum(sizes)})


def _can_merge(values: Sequence[Any], reduce_fx: Any) -> bool:
    """Whether the parts' values make one; if not, `Module.log` takes them one by one, or says what is wrong."""
    numbers = all(isinstance(value, Tensor | int | float) for value in values)
    return numbers and isinstance(reduce_fx, str) and reduce_fx in ("mean", "sum", "max", "min")


def _merged(name: str, values: Sequence[Any], sizes: Sequence[int], reduce_fx: str) -> Any:
    numbers = [number(name, value) for value in values]
    if reduce_fx == "mean":
        precise = [value.double() if isinstance(value, Tensor) else value for value in numbers]
        return sum(value * (size / sum(sizes)) for value, size in zip(precise, sizes, strict=True))
    return functools.reduce(lambda total, value: combine(total, value, reduce_fx), numbers, None)
