"""Keep the optimizer on rank 0 only, as a parameter server does: its state needs memory on one process."""

from __future__ import annotations

import torch
from attrs import define

from stratagem.api import Capabilities, Strategy, hookimpl
from stratagem.api.capabilities import CLIP_BY_NORM, CLIP_BY_VALUE, FULL_STATE, MULTI_PROCESS, NO_SYNC
from stratagem.api.named_state import logical_optimizer_state, physical_optimizer_state


@define(eq=False, kw_only=True)
class CentralStrategy(Strategy):
    """Average gradients on all ranks, step on rank 0, and broadcast its parameters."""

    capabilities = Capabilities(provides={CLIP_BY_NORM, CLIP_BY_VALUE, FULL_STATE, MULTI_PROCESS, NO_SYNC})

    @hookimpl
    def wrap_model(self, module, run):
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        return module

    @hookimpl
    def backward(self, loss, module, run):
        loss.backward()
        if run.sync_gradients:  # false while gradients are only accumulated
            parameters = [p for p in module.parameters() if p.requires_grad]
            for parameter in parameters:
                if parameter.grad is None:  # unused by this rank's loss; another rank's may use it
                    parameter.grad = torch.zeros_like(parameter)
            for future in [run.collectives.average_async(parameter.grad) for parameter in parameters]:
                future.wait()
        return True

    @hookimpl
    def optimizer_step(self, optimizer, run):
        if run.rank == 0:
            optimizer.step()
        run.collectives.replicate(p for group in optimizer.param_groups for p in group["params"])
        return True

    def rank_classes(self, run):
        return [ranks for ranks in ([0], range(1, run.world_size)) if ranks]  # for plans: rank 0 holds more

    @hookimpl
    def optimizer_state(self, optimizer, module, run):
        return run.collectives.broadcast_object(logical_optimizer_state(optimizer, module))

    @hookimpl
    def load_optimizer_state(self, state, optimizer, module, run):
        state = state if run.rank == 0 else state | {"state": {}}
        optimizer.load_state_dict(physical_optimizer_state(state, optimizer, module))
        return True
