"""Gemini on a CPU, for tests only: "device memory" is host memory, and shards stay where they are.

Everything else is the engine: chunks, their gathers and reductions over gloo, masters, the optimizer's shards.
"""

from types import SimpleNamespace

import torch
from attrs import define
from colossalai.nn.optimizer import CPUAdam
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.zero.gemini import gemini_optimizer
from colossalai.zero.gemini.chunk import chunk, manager
from stratagem_colossalai.host import use_host
from stratagem_colossalai.sharded import GeminiStrategy

from stratagem.api import Capabilities, hookimpl


class HostAdam(CPUAdam):
    """CPUAdam (AdamW) without its compiled kernel."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.adamw_mode = True
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        NVMeOptimizer.__init__(self, params, defaults, 0.0, None)

    @torch.no_grad()
    def step(self, closure=None, div_scale=-1.0):
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                self._update(parameter, group, div_scale if div_scale > 0 else 1.0)

    def _update(self, parameter, group, scale):
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        first, second = group["betas"]
        self.torch_adam_update(
            parameter.data, parameter.grad.float() / scale, state["exp_avg"], state["exp_avg_sq"], group["lr"],
            first, second, group["eps"], group["weight_decay"], 1 - first ** state["step"], 1 - second ** state["step"],
            self.adamw_mode,
        )  # fmt: skip


class HostChunk(chunk.Chunk):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.shard_device = SimpleNamespace(type="cuda")

    def shard_move(self, device, force_copy=False, non_blocking=False):
        pass


@define(eq=False, kw_only=True)
class HostGemini(GeminiStrategy):
    """The strategy without its need for CUDA."""

    @property
    def capabilities(self):
        own = GeminiStrategy.capabilities.fget(self)
        return Capabilities(provides=own.provides, conflicts=own.conflicts)

    @hookimpl
    def on_connect(self, run):
        use_host()
        manager.Chunk = chunk.Chunk = HostChunk
        gemini_optimizer._AVAIL_OPTIM_LIST.add(HostAdam)
