"""`elastic_averaging` passes the checks of every outer strategy, and trains as copies in one process do."""

import torch

from stratagem_testing import StrategyConformance
from stratagem_testing.strategy.outer import mix


class TestElasticAveraging(StrategyConformance):
    plugin = "elastic_averaging"
    world_sizes = (2, 3)

    def meet(self, step: int, teams: list[list[torch.Tensor]]) -> None:
        """Do to all teams what the strategy does, in one process."""
        if step % 4 == 0:
            mix(teams, 0.5 * torch.eye(len(teams)) + 0.5 / len(teams))
