"""Replicas of the model; gradients and optimizer state divided among the processes (ZeRO, stage 2)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from stratagem import Capabilities, Strategy, hookimpl
from stratagem.plugin import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
)
from stratagem.state import logical_optimizer_state, physical_optimizer_state
from stratagem.world import DEFAULT_TIMEOUT, Collectives, TorchCollectives

#: Marks a gradient that is an average over the ranks: what is added to it later is not averaged yet.
_AVERAGED = "_stratagem_averaged"
#: Numbers up to which a tensor of the optimizer's is sent along with the outline of its state.
_SMALL = 64


@define(eq=False, kw_only=True)
class ShardedDDPStrategy(Strategy):
    """Each process owns a share of the parameters: it alone keeps their gradients and optimizer state, and steps them.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 2.
    """

    #: How long a rank waits for the others before it gives up, in seconds or as a timedelta.
    timeout: timedelta = DEFAULT_TIMEOUT
    #: torch.distributed backend; by default the one that fits the device.
    process_group_backend: str | None = None

    #: Which rank owns a parameter.
    _owners: Any = field(init=False, factory=WeakTensorKeyDictionary)

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, FULL_STATE, MANUAL_OPTIMIZATION, MULTI_PROCESS, MULTIPLE_OPTIMIZERS, NO_SYNC,
        }
    )  # fmt: skip

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta) and isinstance(self.timeout, int | float):
            self.timeout = timedelta(seconds=self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {"timeout": self.timeout, "process_group_backend": self.process_group_backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def join_timeout(self) -> timedelta:
        return self.timeout

    @hookimpl
    def connect(self, world, run):
        if world.world_size == 1:
            return Collectives()
        backend = self.process_group_backend or run.stack.accelerator.plugin.backend
        return TorchCollectives.connect(world, run.device, backend=backend, timeout=self.timeout)

    @hookimpl
    def wrap_model(self, module, run):
        module = module.to(run.device)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                run.collectives.broadcast(tensor.data)
        self._divide(module, run.world_size)
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
            loss.backward()
            return True
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = {}
        for parameter in parameters:  # what is averaged already must not be averaged with the rest again
            if getattr(parameter.grad, _AVERAGED, False):
                before[parameter], parameter.grad = parameter.grad, None
        loss.backward()
        self._average([p for p, reached in zip(parameters, _reached(parameters, run), strict=True) if reached], run)
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return True

    def _average(self, parameters, run):
        """Average the gradients of `parameters`; keep those that this rank owns."""
        for parameter in parameters:
            if parameter.grad is None:  # this rank's loss did not reach it, another's did
                parameter.grad = torch.zeros_like(parameter)
        futures = [run.collectives.average_async(parameter.grad) for parameter in parameters]
        for parameter, future in zip(parameters, futures, strict=True):
            future.wait()
            if self._owners[parameter] == run.rank:
                setattr(parameter.grad, _AVERAGED, True)
            else:
                parameter.grad = None

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
        total = run.collectives.all_reduce(squares, "sum").sqrt()
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return total

    @hookimpl(wrapper=True)
    def optimizer_step(self, optimizer, run):
        # Without gradients an optimizer passes by what this rank does not own, and keeps no state for it.
        stepped = yield
        if stepped:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        run.collectives.broadcast(parameter.data, self._owners[parameter])
        return stepped

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def optimizer_state(self, optimizer, module, run):
        logical = logical_optimizer_state(optimizer, module)
        mine, state = logical["state"], {}
        # One tensor after the other: no rank ever holds more of the others' state than it is asked for.
        for owner, theirs in enumerate(run.collectives.all_gather_object(_outline(mine))):
            for name, entry in theirs.items():
                state[name] = {
                    key: self._fetch(mine.get(name, {}).get(key), value, owner, run)
                    if isinstance(value, _Shape)
                    else value
                    for key, value in entry.items()
                }
        order = [name for group in logical["param_groups"] for name in group["params"] if name in state]
        return logical | {"state": {name: state[name] for name in order}}

    def _fetch(self, mine, shape, owner, run):
        """Return the owner's tensor where it is needed; on the meta device elsewhere. Collective."""
        absent = torch.empty(shape.size, dtype=shape.dtype, device="meta")
        if not run.whole_state:
            return absent if mine is None else mine
        tensor = torch.empty(shape.size, dtype=shape.dtype, device=run.device) if mine is None else mine
        tensor = run.collectives.broadcast(tensor.contiguous(), owner)
        return tensor if run.needs_values else absent

    @hookimpl
    def load_optimizer_state(self, state, optimizer, module, run):
        owned = {name for name, p in module.named_parameters() if self._owners.get(p, run.rank) == run.rank}
        mine = {name: entry for name, entry in state["state"].items() if name in owned}
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
    return run.collectives.all_reduce(flags, "max").bool().tolist() if parameters else []
