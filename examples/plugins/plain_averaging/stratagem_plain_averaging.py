"""Data parallelism by hand: one message after backward averages all gradients."""

import torch
from attrs import define

from stratagem.api import Capabilities, RunContext, Strategy, hookimpl
from stratagem.api.capabilities import CLIP_BY_NORM, CLIP_BY_VALUE, FULL_STATE, MULTI_PROCESS, NO_SYNC


@define(eq=False, kw_only=True)
class PlainAveraging(Strategy):
    """A replica in every process; one message averages all gradients."""

    capabilities = Capabilities(provides={CLIP_BY_NORM, CLIP_BY_VALUE, FULL_STATE, MULTI_PROCESS, NO_SYNC})

    @hookimpl
    def wrap_model(self, module: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        return module

    @hookimpl
    def backward(self, loss: torch.Tensor, module: torch.nn.Module, run: RunContext) -> bool:
        run.differentiate(loss)
        if run.sync_gradients:  # False while gradients are only accumulated
            parameters = [p for p in module.parameters() if p.requires_grad]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            message = run.collectives.average_async(torch.cat([each.flatten() for each in gradients])).wait()
            for parameter, part in zip(parameters, message.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return True
