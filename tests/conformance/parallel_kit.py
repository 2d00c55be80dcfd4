"""The kit's models with a layer of experts, for strategies that divide experts over processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch import nn

from stratagem.api.seeding import seeded
from stratagem_testing import StrategyConformance

_EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture_of_experts.py"


def layer_of_experts(width: int, seed: int) -> nn.Module:
    """Return the layer of the example, with experts for a process each of up to four."""
    spec = importlib.util.spec_from_file_location("mixture_of_experts", _EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_EXAMPLE.parent))
        spec.loader.exec_module(module)
    with seeded(seed):
        return module.MixtureOfExperts(width, 8, 4)


class WithExperts(StrategyConformance):
    """In each network of a module the activation between the first two layers is followed by experts."""

    test_a_plan_says_what_a_run_sends_and_holds = None  # tests/plan has experts that get as many tokens each

    def prepare(self, module):
        module.parallel_plan = None  # `expert` finds the layers; nothing else is cut
        for name in ("net", "generator", "critic"):
            network = getattr(module, name, None)
            if network is not None:
                width = network[0].out_features
                experts = layer_of_experts(width, seed=1).to(network[0].weight.dtype)
                network[1] = nn.Sequential(network[1], experts)
        return module
