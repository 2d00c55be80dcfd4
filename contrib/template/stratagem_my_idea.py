"""Replicate the model in every process and average the gradients after backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    Capabilities,
    Strategy,
    hookimpl,
)

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class MyIdea(Strategy):
    """A replica in every process; gradients are averaged when a micro-batch closes its accumulation window."""

    #: Give every process rank 0's buffers (the statistics of batch norm) before validation: a message for each buffer.
    #: Without it every process validates with its own.
    broadcast_buffers: bool = True

    # What a run may ask of this strategy. A run that asks for more is refused before any process starts, so claim only
    # what is true: here no buckets for communication hooks, and no optimizers that call a closure.
    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM,  # every process holds all gradients, so the core's own clipping is right
            CLIP_BY_VALUE,
            FULL_STATE,  # and all parameters, so the core's own saving and loading is right
            MANUAL_OPTIMIZATION,
            MULTI_PROCESS,
            MULTIPLE_OPTIMIZERS,
            NO_SYNC,  # see `backward`
        }
    )

    @hookimpl
    def wrap_model(self, module: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        return module

    @hookimpl
    def backward(self, loss: torch.Tensor, module: torch.nn.Module, run: RunContext) -> bool:
        loss.backward()
        if run.sync_gradients:
            _average([parameter for parameter in module.parameters() if parameter.requires_grad], run)
        return True

    @hookimpl
    def on_validation_start(self, run: RunContext) -> None:
        if self.broadcast_buffers:
            assert run.module is not None, "it is being validated"
            run.collectives.replicate(run.module.buffers())


def _average(parameters: list[torch.nn.Parameter], run: RunContext) -> None:
    """Replace every gradient by its mean over the processes; all messages are on their way before the first wait."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:  # the loss of this process did not reach it; that of another may have
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for future in [run.collectives.average_async(gradient) for gradient in gradients]:
        future.wait()
