"""What every strategy must do: train as one process would, do what it claims, and refuse what it does not claim."""

from __future__ import annotations

from stratagem_testing.strategy.accumulation import AccumulationChecks
from stratagem_testing.strategy.combinations import CombinationChecks
from stratagem_testing.strategy.data import DataChecks
from stratagem_testing.strategy.mesh import MeshChecks
from stratagem_testing.strategy.optimization import OptimizationChecks
from stratagem_testing.strategy.outer import OuterChecks
from stratagem_testing.strategy.plans import PlanChecks
from stratagem_testing.strategy.processes import ProcessChecks
from stratagem_testing.strategy.state import StateChecks
from stratagem_testing.strategy.weights import WeightChecks


# Checks run from the last base class to the first.
class StrategyConformance(
    PlanChecks,
    OuterChecks,
    ProcessChecks,
    DataChecks,
    MeshChecks,
    StateChecks,
    CombinationChecks,
    OptimizationChecks,
    AccumulationChecks,
    WeightChecks,
):
    """Trains small models in real processes and compares with plain PyTorch on the joined batches.

        class TestMyStrategy(StrategyConformance):
            plugin = "my_strategy"
            world_sizes = (1, 2)

    Every capability that the strategy provides must work. Every other capability must be refused with an error message
    that names it; such a check is skipped, with that message as the reason.

    For an outer strategy, checks that compare with one process are skipped, as are checks of capabilities, which depend
    on the strategy inside it.
    """
