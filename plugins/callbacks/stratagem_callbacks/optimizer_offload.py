"""Keep the optimizer's state in the memory of the host, and bring it to the device part by part in each step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from stratagem.api import LOSS_SCALING, STEPPED_COPIES, Capabilities, hookimpl
from stratagem.api.capabilities import CUSTOM_STEP, STEPS_IN_BACKWARD
from stratagem.api.validators import more_than
from stratagem.errors import ConfigError
from stratagem_callbacks.parameter_steps import check_steps_some, step_some
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch.optim import Optimizer

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: Parameters of one group of an optimizer, and the number of the group.
_Part = tuple[int, list[torch.nn.Parameter]]
#: The tensors of their state, by parameter and name.
_State = dict[torch.nn.Parameter, dict[str, torch.Tensor]]


@define(eq=False, kw_only=True)
class OptimizerOffload(Callback):
    """Keep the optimizer's state in pinned memory of the host; each step brings it to the GPU part by part.

    Ren et al., "ZeRO-Offload", ATC 2021, moves the step to the CPU; here the GPU steps, and the next part is on its way
    while one is stepped. Checkpoints are those of a run without it. Raises a `ConfigError` before training for devices
    other than CUDA's, and for optimizers that step a parameter by more than its gradient and state.
    """

    #: MiB of parameters that are stepped at a time. The GPU holds the state of two such parts.
    part_mb: float = field(default=64.0, validator=more_than(0))
    #: Also step optimizers other than torch's: each must step a parameter by its gradient and its state alone.
    any_optimizer: bool = False

    capabilities = Capabilities(
        requires={CUSTOM_STEP}, conflicts={LOSS_SCALING, STEPPED_COPIES, STEPS_IN_BACKWARD}
    )  # fmt: skip

    _mover: Any = field(init=False, default=None)

    @hookimpl
    def on_train_start(self, run: RunContext) -> None:
        check_steps_some(run, "optimizer_offload", self.any_optimizer)
        self._mover = self._mover_for(run)
        for optimizer in run.optimizers:
            self._mover.put_back(optimizer, list(optimizer.state), {})  # a checkpoint brought it to the device
        self._mover.finish()

    def _mover_for(self, run: RunContext) -> StateMover:
        if run.device.type != "cuda":
            raise ConfigError(
                f"optimizer_offload was chosen on {run.device}", expected="a GPU of CUDA: the host keeps state already",
                do="drop the callback",
            )  # fmt: skip
        return StateMover(run.device)

    @hookimpl(wrapper=True)
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None
    ) -> Generator[None, bool, bool]:  # fmt: skip
        if self._mover is None:  # a trial before training
            return (yield)
        if closure is not None:
            raise ConfigError(
                "optimizer_offload was chosen, and optimizer.step got a closure", expected="gradients before the step",
                do="call the closure, then step()",
            )  # fmt: skip
        gradients = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
        self._step_parts(optimizer)
        stepped = yield  # finds no gradients, and counts the step
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return stepped

    def _step_parts(self, optimizer: Optimizer) -> None:
        parts = list(_parts(optimizer, self.part_mb * 2**20))
        fetched = self._mover.fetch(optimizer, parts[0][1]) if parts else None
        for (index, parameters), following in zip(parts, [*parts[1:], None], strict=True):
            ahead = None if following is None else self._mover.fetch(optimizer, following[1])
            hosts = self._mover.use(optimizer, fetched)
            step_some(optimizer, optimizer.param_groups[index], parameters)
            self._mover.put_back(optimizer, parameters, hosts)
            for parameter in parameters:
                parameter.grad = None
            fetched = ahead
        self._mover.finish()

    @hookimpl(wrapper=True)
    def optimizer_state(self, optimizer: Optimizer) -> Generator[None, dict[str, Any], dict[str, Any]]:
        """Bring shards to the device, whose process group gathers them."""
        sharded = [each for each in optimizer.state if hasattr(each, "full_tensor")]
        if self._mover is None or not sharded:
            return (yield)
        hosts = self._mover.use(optimizer, self._mover.fetch(optimizer, sharded))
        state = yield
        for parameter, values in hosts.items():
            optimizer.state[parameter].update(values)
        return state

    @hookimpl
    def teardown(self) -> None:
        self._mover = None


def fits(trainer: TrainerView) -> bool:
    """Whether the callback helps the optimizers of this fit, as far as it checks them."""
    try:
        check_steps_some(trainer.run, "optimizer_offload", any_optimizer=False)
    except ConfigError:
        return False
    return trainer.run.device.type == "cuda"


def _parts(optimizer: Optimizer, size: float) -> Iterator[_Part]:
    """Yield the parameters that have gradients, in parts of at least `size` bytes; the last part of a group is less."""
    for index, group in enumerate(optimizer.param_groups):
        part: list[torch.nn.Parameter] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                part.append(parameter)
            if sum(getattr(each, "_local_tensor", each).nbytes for each in part) >= size:
                yield index, part
                part = []
        if part:
            yield index, part


class StateMover:
    """Moves the state of parameters between the host and `device`, on a stream beside the one that computes.

    Tensors without dimensions, such as counts of steps, stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def fetch(self, optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> tuple[_State, Any]:
        """Start to copy the state of `parameters` to the device; return the copies, and the event of their arrival."""
        with self._beside():
            copies = {
                parameter: {name: value.to(self.device, non_blocking=True, copy=True) for name, value in moved}
                for parameter in parameters
                if (moved := _moved(optimizer, parameter))
            }
            return copies, None if self._stream is None else self._stream.record_event()

    def use(self, optimizer: Optimizer, fetched: tuple[_State, Any]) -> _State:
        """Make `fetched` the state of its parameters; return what was."""
        copies, arrival = fetched
        if arrival is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(arrival)
            for value in (_local(each) for values in copies.values() for each in values.values()):
                value.record_stream(computing)
        hosts = {parameter: dict(_moved(optimizer, parameter)) for parameter in copies}
        for parameter, values in copies.items():
            optimizer.state[parameter].update(values)
        return hosts

    def put_back(self, optimizer: Optimizer, parameters: list[torch.nn.Parameter], hosts: _State) -> None:
        """Copy the state of `parameters` to the tensors in `hosts`, or new ones, which become their state."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._beside():
            for parameter in parameters:
                for name, value in _moved(optimizer, parameter):
                    host = hosts.get(parameter, {}).get(name)
                    if host is None or host.device.type != "cpu" or host.shape != value.shape:
                        host = self._empty(value)
                    host.copy_(value, non_blocking=True)
                    if self._stream is not None and _local(value).is_cuda:
                        _local(value).record_stream(self._stream)
                    optimizer.state[parameter][name] = host

    def _empty(self, value: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(value, device="cpu")
        if self._stream is None:
            return host
        if not hasattr(host, "_local_tensor"):
            return host.pin_memory()
        host._local_tensor = host._local_tensor.pin_memory()  # a DTensor on the mesh of `value`, as FSDP2 offloads it
        return host

    def finish(self) -> None:
        """Wait until the host has the state."""
        if self._stream is not None:
            self._stream.synchronize()


def _moved(optimizer: Optimizer, parameter: torch.nn.Parameter) -> list[tuple[str, torch.Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(name, each) for name, each in state.items() if isinstance(each, torch.Tensor) and each.dim()]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
