"""What the conformance kit needs to know of these strategies: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import Any

from stratagem_testing import StrategyConformance


class NoUnusedParametersConformance(StrategyConformance):
    """It refuses a step in which a parameter gets no gradient, as each of a GAN's does in the other's steps."""

    test_several_optimizers: Any = None
