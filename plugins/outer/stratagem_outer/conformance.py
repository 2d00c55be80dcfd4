"""What the conformance kit needs to know of these plugins: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import Any, ClassVar

from stratagem_testing import CommHookConformance, StrategyConformance
from stratagem_testing.strategy.outer import averaging


class PostLocalSGDConformance(CommHookConformance):
    """While it averages all gradients."""

    plugin: ClassVar = {"name": "post_localsgd", "model_averaging_period": 2, "start_localSGD_iter": 100}


class LocalSGDConformance(StrategyConformance):
    """It averages all teams every eight steps."""

    world_sizes = (2,)
    meet: Any = staticmethod(averaging(8))
