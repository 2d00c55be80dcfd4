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
class MyIdeaStrategy(Strategy):
    """Keep a replica in every process; average gradients after the last micro-batch of each accumulation."""

    #: Broadcast rank 0's buffers (BatchNorm statistics) before validation: one message for each buffer. If False, each
    #: process validates with its own.
    broadcast_buffers: bool = True

    # The features that this strategy supports. A run that needs others is refused before any process starts, so list
    # only those that work: here neither buckets for communication hooks, nor optimizers with a closure.
    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM,  # every process has all gradients, so the core's clipping is correct
            CLIP_BY_VALUE,
            FULL_STATE,  # and all parameters, so the core's saving and loading is correct
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

    @hookimpl(optionalhook=True)
    def on_validation_start(self, run: RunContext) -> None:
        if self.broadcast_buffers:
            assert run.module is not None, "set during validation"
            run.collectives.replicate(run.module.buffers())


def _average(parameters: list[torch.nn.Parameter], run: RunContext) -> None:
    """Replace each gradient by its mean over the processes; start all messages before waiting for the first."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:  # unused by this process's loss; another may use it
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for future in [run.collectives.average_async(gradient) for gradient in gradients]:
        future.wait()
