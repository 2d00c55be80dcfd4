"""Pipelines in one process with FairScale's Pipe: an nn.Sequential is cut over devices, a batch into micro-batches."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field
from torch import nn

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    COMPILATION,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    Capabilities,
    Strategy,
    hookimpl,
)
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError, shown
from stratagem_fairscale.installed import check_installed

if TYPE_CHECKING:
    from attrs import Attribute

    from stratagem.api import RunContext

_PATH = "strategy.fairscale_pipe"
_INSTEAD = 'choose strategy="pipeline_parallel"'


def _check_balance(_: Any, __: Attribute[Any], value: Any) -> None:
    numbers = isinstance(value, list | tuple) and value and all(type(each) is int and each >= 1 for each in value)
    if value is not None and not numbers:
        raise ConfigError(
            f"{_PATH}.balance is {shown(value)}",
            expected="how many layers each partition has, such as [3, 2]",
            do=f"give numbers, or {_INSTEAD}, which can balance by size and by time",
        )


@define(eq=False, kw_only=True)
class FairScalePipeStrategy(Strategy):
    """Cut `sequential_module` into partitions on several devices; micro-batches go through them one after another.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
    """

    #: How many layers each partition has. None: the module's attribute `balance`, or one device for all layers.
    balance: list[int] | None = field(default=None, validator=_check_balance)
    #: Number of micro-batches of a batch. More keep more devices busy, and layers compute on fewer samples at a time.
    chunks: int = field(default=1, validator=at_least(1))
    #: For which micro-batches activations are computed again in backward, to save memory.
    checkpoint: Literal["always", "except_last", "never"] = "except_last"
    #: The device of each partition. None: the run's devices in order; on a CPU all partitions are on it.
    devices: list[str] | None = None

    _undo: list[Callable[[], None]] = field(init=False, factory=list)

    process_per_device = False
    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, CUSTOM_STEP, FULL_STATE,
            MANUAL_OPTIMIZATION, MULTIPLE_OPTIMIZERS, NO_SYNC,
        },
        conflicts={COMPILATION},
    )  # fmt: skip

    @hookimpl
    def on_connect(self) -> None:
        check_installed("fairscale_pipe", "pipeline_parallel")

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        assert run.module is not None, "set before wrap_model is called"
        self._release()
        module = module.to(run.device)
        layers = _sequence(run.module)
        balance = self.balance or getattr(run.module, "balance", None) or [len(layers)]
        _check_balance(None, None, balance)  # type: ignore[arg-type]  # that of the module
        if sum(balance) != len(layers):
            raise ConfigError(
                f"{_PATH}.balance is {list(balance)}, for {sum(balance)} layers, and the nn.Sequential has "
                f"{len(layers)}",
                expected="numbers with that sum",
            )
        for name, parameter in run.module.named_parameters():
            if parameter._post_accumulate_grad_hooks and self.chunks > 1:
                raise ConfigError(
                    f"{name} has a hook that is called after its gradient is accumulated, and {_PATH}.chunks is "
                    f"{self.chunks}: each chunk accumulates",
                    expected="a hook that is called once for each batch", do="use on_before_optimizer_step",
                )  # fmt: skip
        pipe = self._pipe(layers, list(balance), self._devices(len(balance), run))
        vars(layers)["forward"] = _Forward(pipe, layers, run.device)
        self._undo.append(lambda: vars(layers).pop("forward", None))
        return module

    def _devices(self, number: int, run: RunContext) -> list[torch.device]:
        given = [_device(each) for each in self.devices or ()] or list(run.devices)
        if not self.devices and len(given) <= number and run.device.type == "cpu":
            given = [run.device] * number
        are_chosen = bool(self.devices) or run.stack.devices_given
        if len(given) < number or (are_chosen and len(given) > number):
            raise ConfigError(
                f"{_PATH}.balance has {number} partition{'s' * (number > 1)}, and there are {len(given)} devices",
                expected="a device for each partition",
                do=f"set {_PATH}.balance to the layers of each of {len(given)} partitions, or choose {number} of them",
            )
        return given[:number]

    def _pipe(self, layers: nn.Sequential, balance: list[int], devices: list[torch.device]) -> Any:
        from fairscale.nn import Pipe

        before = set(threading.enumerate())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it names a class that torch removed
            try:
                pipe = Pipe(layers, balance, devices=devices, chunks=self.chunks, checkpoint=self.checkpoint)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"FairScale cannot cut this nn.Sequential: {str(error).splitlines()[0]}",
                    expected="layers that occur once, with parameters of their own",
                    do=_INSTEAD,
                ) from error
        self._end_in_time(pipe.pipeline, [each for each in threading.enumerate() if each not in before])
        return pipe

    def _end_in_time(self, pipeline: Any, threads: list[threading.Thread]) -> None:
        """Have the `threads` of `pipeline` end with this run.

        The engine ends them when it is collected, which an exception may delay to the end of the program. By then
        daemon threads have stopped, and it would wait for them forever; or one that still runs aborts the program.
        """

        def end() -> None:
            for queue in set(pipeline.in_queues):
                queue.put(None)
            pipeline.in_queues, pipeline.out_queues = [], []
            for thread in threads:
                thread.join()

        self._undo.append(end)

    @hookimpl
    def teardown(self) -> None:
        self._release()

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("balance", "chunks", "checkpoint", "devices")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs generates it


def _sequence(user: nn.Module) -> nn.Sequential:
    """Return the nn.Sequential that is cut: `sequential_module`, or the only one that `user` has."""
    given = getattr(user, "sequential_module", None)
    found = [child for child in user.children() if isinstance(child, nn.Sequential)] if given is None else [given]
    if len(found) == 1 and isinstance(found[0], nn.Sequential):
        return found[0]
    what = f"{len(found)} nn.Sequential" if given is None else f"a {type(given).__name__} as sequential_module"
    raise ConfigError(
        f"{type(user).__name__} has {what}, and strategy fairscale_pipe cuts one nn.Sequential",
        expected="an nn.Sequential of its layers in the attribute sequential_module",
        do="set self.sequential_module",
    )


def _device(name: str) -> torch.device:
    """Return a device of this machine.

    Raises:
        ConfigError: there is none of this name.
    """
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"{_PATH}.devices has {shown(name)}, which this machine does not have ({str(error).splitlines()[0]})",
            expected='devices of this machine, such as ["cuda:0", "cuda:1"]',
        ) from error


class _Forward:
    """A forward for `layers` that calls `pipe`, and returns what it returns on `device`."""

    def __init__(self, pipe: Any, layers: nn.Sequential, device: torch.device) -> None:
        self._pipe, self._layers, self._device = pipe, layers, device
        self._contexts: list[Callable[[], contextlib.AbstractContextManager[None]]] = [contextlib.nullcontext]
        for partition in pipe.partitions:
            vars(partition)["forward"] = _within(self._contexts, type(partition).forward, partition)

    def __call__(self, value: Any) -> Any:
        self._contexts[0] = _autocast_of_this_thread()
        for partition in self._pipe.partitions:
            partition.training = self._layers.training  # not that of the layers, which a user may have set
        out = self._pipe(value)
        return out.to(self._device) if isinstance(out, torch.Tensor) else tuple(each.to(self._device) for each in out)

    def __reduce__(self) -> Any:
        # A copy of the layers, such as an average of the weights, computes with its own layers, without the pipeline.
        return functools.partial, (type(self._layers).forward, self._layers)


def _within(contexts: list[Any], forward: Callable[..., Any], partition: nn.Module) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        with contexts[0]():
            out = forward(partition, value)
        if not all(isinstance(each, torch.Tensor) for each in (out if isinstance(out, tuple) else (out,))):
            last = type(list(partition.children())[-1]).__name__
            raise ConfigError(
                f"the last layer of a partition, {last}, returns a {type(out).__name__}, and {_PATH} passes tensors "
                "from one partition to the next",
                expected="a tensor, or a tuple of tensors",
                do=f"move the border with {_PATH}.balance, or {_INSTEAD}",
            )
        return out

    return run


def _autocast_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a maker of contexts with the autocast of this thread. The engine's threads do not inherit it."""
    states = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    return context
