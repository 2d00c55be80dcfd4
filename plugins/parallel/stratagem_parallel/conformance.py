"""What the conformance kit checks of `expert_parallel`: its models with a layer of experts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stratagem.api.seeding import seeded
from stratagem_testing import StrategyConformance


class Experts(nn.Module):
    """Layers of which each token uses some, as transformers' models have them."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden**0.5)

    def forward(self, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what the experts `top_k_index`, (N, K), make of the `tokens`, (N, width)."""
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            made = torch.tanh(tokens[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, made * top_k_weights[token, place].unsqueeze(-1))
        return out


class Routed(nn.Module):
    """A router, which every process has whole, and its experts; one for each of up to four processes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4, bias=False), Experts(4, width, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, indices = self.router(tokens).topk(2)
        out: Tensor = tokens + self.experts(tokens, indices, weights.softmax(-1))
        return out


class ExpertsConformance(StrategyConformance):
    """In each network of a module the activation between the first two layers is followed by experts."""

    world_sizes: ClassVar = (2,)
    # It counts what each rank sends: these experts do not get as many tokens each.
    test_a_plan_says_what_a_run_sends_and_holds: Any = None

    def prepare(self, module: Any) -> Any:
        module.parallel_plan = None  # `expert` finds the layers; nothing else is cut
        for name in ("net", "generator", "critic"):
            network = getattr(module, name, None)
            if network is not None:
                with seeded(1):
                    experts = Routed(network[0].out_features)
                network[1] = nn.Sequential(network[1], experts.to(network[0].weight.dtype))
        return module
