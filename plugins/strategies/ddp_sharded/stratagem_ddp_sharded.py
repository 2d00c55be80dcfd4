"""Replicas of the model; gradients and optimizer state divided among the processes (ZeRO, stage 2)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from stratagem import Capabilities, Strategy, hookimpl
from stratagem.errors import ConfigError
from stratagem.options import duration, more_than, not_empty
from stratagem.plugin import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    WITHIN_TEAM,
    Bucket,
)
from stratagem.state import logical_optimizer_state, physical_optimizer_state
from stratagem.tuning import gloo_options, in_force, nccl_options, take_back
from stratagem.world import DEFAULT_TIMEOUT, Collectives, TorchCollectives

#: Marks a gradient that is an average over the ranks: what is added to it later is not averaged yet.
_AVERAGED = "_stratagem_averaged"
#: What a copy in another process is made of.
_OPTIONS = ("bucket_cap_mb", "timeout", "process_group_backend", "nccl", "gloo")
#: Numbers up to which a tensor of the optimizer's is sent along with the outline of its state.
_SMALL = 64


@define(eq=False, kw_only=True)
class ShardedDDPStrategy(Strategy):
    """Each process owns a share of the parameters: it alone keeps their gradients and optimizer state, and steps them.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 2.
    """

    #: Gradients that travel together through comm hooks, in megabytes (25 unless set): larger buckets mean fewer
    #: messages, and more memory while they are on their way. Without a hook parameters travel one by one.
    bucket_cap_mb: float | None = field(default=None, validator=more_than(0))
    #: How long a rank waits for the others before it gives up, in seconds or as a timedelta.
    timeout: timedelta = field(default=DEFAULT_TIMEOUT, validator=duration)
    #: torch.distributed backend; by default the one that fits the device.
    process_group_backend: str | None = field(default=None, validator=not_empty)
    #: NCCL's variables, in lower case and without the prefix: {"socket_ifname": "eth0"}. What speeds up one network
    #: slows down another; by default NCCL finds out by itself.
    nccl: dict[str, Any] | None = field(default=None, validator=nccl_options)
    #: gloo's likewise. With NCCL they matter for what is saved in the background, which gloo synchronises.
    gloo: dict[str, Any] | None = field(default=None, validator=gloo_options)

    #: Which rank owns a parameter.
    _owners: Any = field(init=False, factory=WeakTensorKeyDictionary)
    #: The comm hooks at work; None without any.
    _reduce: Any = field(init=False, default=None)

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, CUSTOM_STEP, FULL_STATE, GRADIENT_BUCKETS, MANUAL_OPTIMIZATION, MULTI_PROCESS,
            MULTIPLE_OPTIMIZERS, NO_SYNC, WITHIN_TEAM,
        }
    )  # fmt: skip

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta) and isinstance(self.timeout, int | float):
            self.timeout = timedelta(seconds=self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def join_timeout(self) -> timedelta:
        return self.timeout

    @hookimpl
    def connect(self, world, run):
        if world.world_size == 1:
            return Collectives()
        backend = self.process_group_backend or run.stack.accelerator.plugin.backend
        with in_force(self, run, backend):
            return TorchCollectives.connect(world, run.device, backend=backend, timeout=run.stack.join_timeout())

    @hookimpl
    def teardown(self, run):
        take_back(run)

    @hookimpl
    def wrap_model(self, module, run):
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        self._divide(module, run.peers.world_size)
        self._reduce = run.bucket_reducer() if run.stage == "train" else None
        if self._reduce is None and self.bucket_cap_mb is not None and run.stage == "train":
            raise ConfigError(
                f"strategy.ddp_sharded.bucket_cap_mb is {self.bucket_cap_mb} and there is no comm hook",
                expected="one: without, parameters travel one by one",
                do="drop it, or choose a comm_hook",
            )
        return module

    def _divide(self, module: nn.Module, world_size: int) -> None:
        """Give each parameter to the rank that owns least so far."""
        owned = [0] * world_size
        for parameter in module.parameters():
            owner = owned.index(min(owned))
            self._owners[parameter] = owner
            owned[owner] += parameter.numel()

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def backward(self, loss, module, run):
        if not (run.manual or run.sync_gradients):
            run.differentiate(loss)
            return True
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = {}
        for parameter in parameters:  # what is averaged already must not be averaged with the rest again
            if getattr(parameter.grad, _AVERAGED, False):
                before[parameter], parameter.grad = parameter.grad, None
        run.differentiate(loss)
        self._average([p for p, reached in zip(parameters, _reached(parameters, run), strict=True) if reached], run)
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return True

    def _average(self, parameters, run):
        """Average the gradients of `parameters`; keep those that this rank owns."""
        for parameter in parameters:
            if parameter.grad is None:  # this rank's loss did not reach it, another's did
                parameter.grad = torch.zeros_like(parameter)
        if self._reduce is not None:
            self._average_in_buckets(parameters)
        else:
            with run.peers.traffic.sent_by("gradients"):
                futures = [run.peers.average_async(parameter.grad) for parameter in parameters]
            for future in futures:
                future.wait()
        for parameter in parameters:
            if self._owners[parameter] == run.peers.rank:
                setattr(parameter.grad, _AVERAGED, True)
            else:
                parameter.grad = None

    def _average_in_buckets(self, parameters):
        """Average the gradients of `parameters` through the comm hooks, in flat buckets."""
        groups = _buckets(parameters, (self.bucket_cap_mb or 25.0) * 1e6)
        arrivals = []
        for index, group in enumerate(groups):
            sizes = [parameter.numel() for parameter in group]
            buffer = torch.cat([parameter.grad.flatten() for parameter in group])
            views = [part.view_as(p) for p, part in zip(group, buffer.split(sizes), strict=True)]
            last = index == len(groups) - 1
            bucket = Bucket(
                buffer=buffer, index=index, is_last=last, parameters=tuple(group), gradients=tuple(views)
            )  # fmt: skip
            arrivals.append((group, sizes, self._reduce(bucket)))
        for group, sizes, arrival in arrivals:
            for parameter, part in zip(group, arrival.wait().split(sizes), strict=True):
                parameter.grad.copy_(part.view_as(parameter))

    @hookimpl
    def clip_gradients(self, optimizer, max_norm, max_value, run):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if max_value is not None:
            for gradient in gradients:
                gradient.clamp_(-max_value, max_value)
            return 0.0
        squares = torch.zeros((), device=run.device, dtype=torch.float64)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient).double() ** 2
        total = run.peers.unchecked.all_reduce(squares, "sum").sqrt()
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return total

    @hookimpl(wrapper=True)
    def optimizer_step(self, optimizer, run):
        # Without gradients an optimizer passes by what this rank does not own, and keeps no state for it.
        stepped = yield
        if stepped:
            with torch.no_grad(), run.peers.traffic.sent_by("parameters"):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        run.peers.unchecked.broadcast(parameter.data, self._owners[parameter])
        return stepped

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def optimizer_state(self, optimizer, module, run):
        logical = logical_optimizer_state(optimizer, module)
        others, state = self._owned_by_others(module, run), {}
        # Adagrad makes its state when it is made, also for parameters that another rank steps.
        mine = {name: entry for name, entry in logical["state"].items() if name not in others}
        # One tensor after the other: no rank ever holds more of the others' state than it is asked for.
        for owner, theirs in enumerate(run.peers.all_gather_object(_outline(mine))):
            for name, entry in theirs.items():
                state[name] = {
                    key: self._fetch(mine.get(name, {}).get(key), value, owner, run)
                    if isinstance(value, _Shape)
                    else value
                    for key, value in entry.items()
                }
        order = [name for group in logical["param_groups"] for name in group["params"] if name in state]
        return logical | {"state": {name: state[name] for name in order}}

    def _owned_by_others(self, module, run) -> set[str]:
        """Return the names of the parameters that another rank steps."""
        here = run.peers.rank
        return {name for name, parameter in module.named_parameters() if self._owners.get(parameter, here) != here}

    def _fetch(self, mine, shape, owner, run):
        """Return the owner's tensor where it is needed; on the meta device elsewhere. Collective."""
        absent = torch.empty(shape.size, dtype=shape.dtype, device="meta")
        if not run.whole_state:
            return absent if mine is None else mine
        tensor = torch.empty(shape.size, dtype=shape.dtype, device=run.device) if mine is None else mine
        tensor = run.peers.broadcast(tensor.contiguous(), owner)
        return tensor if run.needs_values else absent

    @hookimpl
    def load_optimizer_state(self, state, optimizer, module, run):
        others = self._owned_by_others(module, run)
        mine = {name: entry for name, entry in state["state"].items() if name not in others}
        optimizer.load_state_dict(physical_optimizer_state(state | {"state": mine}, optimizer, module))
        return True


@frozen
class _Shape:
    """Stands for a tensor that only its owner has."""

    size: tuple[int, ...]
    dtype: torch.dtype


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with large tensors replaced by their shapes."""
    return {
        name: {
            key: _Shape(tuple(value.shape), value.dtype)
            if isinstance(value, torch.Tensor) and value.numel() > _SMALL
            else value
            for key, value in entry.items()
        }
        for name, entry in state.items()
    }


def _reached(parameters, run) -> list[bool]:
    """Return for each parameter whether any rank has a gradient for it: all ranks must send the same ones."""
    flags = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device=run.device)
    return run.peers.unchecked.all_reduce(flags, "max").bool().tolist() if parameters else []


def _buckets(parameters: list[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Group `parameters`, the last ones first as backward reaches them, into buckets of one dtype and `limit` bytes."""
    groups: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[list[nn.Parameter], float]] = {}
    for parameter in reversed(parameters):
        group, left = room.get(parameter.dtype, ([], 0.0))
        if left < parameter.nbytes:
            group, left = [], limit
            groups.append(group)
        group.append(parameter)
        room[parameter.dtype] = group, left - parameter.nbytes
    return groups
