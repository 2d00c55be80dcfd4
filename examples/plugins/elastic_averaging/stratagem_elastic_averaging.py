"""Pull replicas towards their average every few steps, instead of replacing them by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import define, field

from stratagem.api.validators import at_least, between
from stratagem_outer import OuterStrategy, average_in_place

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class ElasticAveraging(OuterStrategy):
    """Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, without its central copy."""

    path: ClassVar[str] = "strategy.elastic_averaging"

    #: Optimizer steps between two syncs. A longer period sends less, and replicas differ more.
    period: int = field(default=4, validator=at_least(1))
    #: Share of the way to the average that each replica goes: 1 is `local_sgd`, less lets replicas explore.
    pull: float = field(default=0.5, validator=between(0, 1))

    def is_sync_step(self) -> bool:
        return self.steps % self.period == 0

    def sync(self, run: RunContext) -> None:
        mine = self.local_parameters()
        own = {name: tensor.clone() for name, tensor in mine.items()}
        average_in_place(mine, self.sync_group, run.device)
        for name, average in mine.items():
            average.lerp_(own[name], 1 - self.pull)
