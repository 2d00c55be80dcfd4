"""The plugins of a planned run: its environment, its accelerator, and what counts its steps."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from attrs import define, field
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from stratagem.api import Accelerator, Environment, Plugin, World, hookimpl
from stratagem.distributed.default_group import leave_group
from stratagem_microbatches import tensors_of
from stratagem_plan.assumptions import AssumingMode, Assumptions
from stratagem_plan.backend import NAME, planned_device
from stratagem_plan.counter import StepCounter
from stratagem_plan.group import PlannedCollectives
from stratagem_plan.patches import quiet_shapes, without_values

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.api import Collectives, RunContext


class Planned(SystemExit):
    """Ends the script: its steps are counted."""


@define(eq=False, kw_only=True)
class PlannedEnvironment(Environment):
    """Says that this process is one of a cluster that does not exist."""

    simulated: ClassVar[bool] = True
    world: World

    def processes_exist(self) -> bool:
        return self.world.world_size > 1

    def local_processes(self) -> int | None:
        return self.world.local_world_size

    def num_nodes(self) -> int | None:
        return self.world.num_nodes

    @hookimpl
    def setup_environment(self) -> World:
        return self.world

    def join(self, world: World, device: torch.device, timeout: timedelta) -> Collectives:
        return PlannedCollectives.over_fake_group(world, device, timeout)


@define(eq=False, kw_only=True)
class PlannedAccelerator(Accelerator):
    """The device that is planned for."""

    num_devices: int
    backend: ClassVar[str] = "fake"

    def count(self) -> int:
        return self.num_devices

    def device(self, index: int) -> torch.device:
        return planned_device()

    def activate(self, device: torch.device) -> None:
        if dist.is_initialized():
            leave_group()  # of an earlier fit: its store is a fake one, in which ranks cannot meet


class _OnDevice(TorchDispatchMode):
    """Makes tensors on the planned device fake ones; those of the CPU stay real, so that decisions have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_here = str(kwargs.get("device")).startswith(NAME)
        if not is_here and not any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if is_here and func is torch.ops.aten._to_copy.default:  # torch would copy values that it knows
            given, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            strides = torch.empty_like(given, device="meta").stride()  # those that torch gives a copy
            return torch.empty_strided(given.size(), strides, dtype=dtype, device=planned_device())
        return func(*args, **kwargs)


@define(eq=False, kw_only=True)
class Planner(Plugin):
    """Lets a run compute with tensors without values, counts its steps, and ends the script after the last one."""

    #: Optimizer steps; the last one is the one that is told.
    num_steps: int = 2
    #: Samples to give each batch; None leaves batches as they come.
    micro_batch: int | None = None
    #: Samples of a batch so far: one that has fewer, such as the last of an epoch, gets as many.
    samples: int = field(init=False, default=0)
    #: How often the second batch of a step counts: a step of many batches is told from one of three.
    repeats: int = 1
    #: Bytes of the device; None if they are not known.
    memory: float | None = None
    counter: StepCounter = field(init=False)
    #: What is taken for the values of tensors.
    assumptions: Assumptions = field(factory=lambda: Assumptions({}))
    fake: AssumingMode = field(init=False)
    #: The run, once it has a model.
    run: Any = field(init=False, default=None)
    #: Numbers in the model's parameters, before the strategy divides them.
    numbers: int = field(init=False, default=0)
    #: Bytes by category at the end of each step.
    ends: list[dict[str, int]] = field(init=False, factory=list)
    #: Batches, samples and whole numbers of the step that is told, of this rank.
    inputs: dict[str, int] = field(init=False, factory=dict)
    #: All ranks, in groups that do the same.
    classes: Sequence[Sequence[int]] = field(init=False, default=((0,),))
    #: Work, messages and inputs of a step after its first batch.
    _first: tuple[Any, dict[str, int]] = field(init=False, factory=lambda: ((), {}))
    _modes: contextlib.ExitStack = field(init=False, factory=contextlib.ExitStack)

    @counter.default
    def _counter(self) -> StepCounter:
        return StepCounter(NAME, math.inf if self.memory is None else self.memory)

    @fake.default
    def _make_fake(self) -> AssumingMode:
        return AssumingMode(self.assumptions)

    def _begin(self) -> None:
        """Compute with tensors without values from here to `close`, also in a loop of the user's."""
        on_device = _OnDevice()  # type: ignore[no-untyped-call]  # torch's
        modules = self.counter.modules.watched()
        for context in (self.fake, on_device, quiet_shapes(self.counter), modules, self.counter):
            self._modes.enter_context(context)

    def close(self) -> None:
        """Let this process compute as before."""
        self._modes.close()
        if dist.is_initialized():
            leave_group()

    @hookimpl(wrapper=True)
    def wrap_dataloader(self) -> Generator[None, Any, Any]:
        loader = yield
        if isinstance(loader, DataLoader):
            loader.pin_memory = False  # there is no device to pin it for
        return loader

    @hookimpl(tryfirst=True)
    def prepare_module(self, module: torch.nn.Module) -> None:
        with self.fake:  # what the script has not built while it is planned
            module._apply(without_values)

    @hookimpl(wrapper=True)
    def wrap_model(self, module: torch.nn.Module, run: RunContext) -> Generator[None, Any, Any]:
        if self.run is None:
            self._begin()
        else:  # another fit has ended before its last step
            self.ends, self.inputs = [], {}
        self.run = run
        user = module.get_submodule("module")
        self.counter.modules.names |= {id(each): name for name, each in user.named_modules()}
        self.numbers = sum(parameter.numel() for parameter in module.parameters())
        with self.counter.within("wrap"):
            model = yield
        for tensor in (*model.parameters(), *model.buffers()):
            self.counter.add(tensor, "parameters")
        self.counter.forget()
        self.counter.settle()
        self.classes = run.strategy.rank_classes(run)
        return model

    @hookimpl(wrapper=True)
    def wrap_optimizers(self) -> Generator[None, list[Optimizer], list[Optimizer]]:
        with self.counter.within("wrap"):
            optimizers = yield
        self._sort(optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True  # torch's choice on a GPU
        return optimizers

    @hookimpl(wrapper=True)
    def transfer_batch(self, batch: Any) -> Generator[None, Any, Any]:
        tensors = list(tensors_of(batch))
        given = next((len(each) for each in tensors if each.dim()), 0)
        samples = self.micro_batch if self.micro_batch is not None and given else max(given, self.samples)
        for each in tensors if given != samples else ():
            if each.dim() and len(each) == given:  # in place: a hook cannot give its caller another batch
                each.data = each[:1].expand(samples, *each.shape[1:])  # without memory
        self.samples = samples
        whole = [each.numel() for each in tensors if not each.is_floating_point()]
        for name, count in (("batches", 1), ("samples", samples), ("tokens", max(whole, default=0))):
            self.inputs[name] = self.inputs.get(name, 0) + count
        return (yield)

    @hookimpl
    def step_context(self, stage: str) -> AbstractContextManager[Any]:
        return self._step(stage)

    @contextlib.contextmanager
    def _step(self, stage: str) -> Iterator[None]:
        yield
        if self.inputs.get("batches") == 1:
            self._first = self.counter.counted(), dict(self.inputs)
        elif self.inputs.get("batches") == 2 and self.repeats > 1:
            self.counter.repeat(self._first[0], self.repeats)
            for name, count in self._first[1].items():
                self.inputs[name] += (self.inputs[name] - count) * (self.repeats - 1)
        if self.run.manual and stage == "train":  # it may step several optimizers, several times
            self._end_step()

    @hookimpl(wrapper=True)
    def backward(self) -> Generator[None, Any, Any]:
        with self.counter.within("backward"):
            done = yield
        for parameter in self.run.model.parameters():
            if parameter.grad is not None:
                self.counter.add(parameter.grad, "gradients")
        self._sort(self.run.optimizers)
        return done

    def _sort(self, optimizers: list[Optimizer]) -> None:
        """Count what optimizers hold beside their state as what they say it is."""
        for optimizer in optimizers:
            for category, tensors in getattr(optimizer, "held", dict)().items():
                for tensor in tensors:
                    self.counter.add(tensor, category)

    @hookimpl(wrapper=True)
    def clip_gradients(self) -> Generator[None, Any, Any]:
        with self.counter.within("optimizer"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def step_optimizers(self, optimizers: list[Optimizer]) -> Generator[None, bool, bool]:
        with self.counter.within("optimizer"):
            stepped = yield
        for each in tree_leaves([list(optimizer.state.values()) for optimizer in optimizers]):
            if isinstance(each, torch.Tensor):
                self.counter.add(each, "optimizer")
        if not self.run.manual:
            self._end_step()
        return stepped

    def _end_step(self) -> None:
        self.ends.append(+self.counter.now)
        if len(self.ends) == self.num_steps:
            raise Planned(0)
        if len(self.ends) == self.num_steps - 1:
            self._forget()
            if len(self.classes) > 1:  # the first step has also asked for the shapes of other stages
                self.counter.settle()
            self.inputs = {}

    def _forget(self) -> None:
        """Count the last step alone, without what a strategy has replaced and Python has not collected yet."""
        gc.collect()
        self.counter.forget()
