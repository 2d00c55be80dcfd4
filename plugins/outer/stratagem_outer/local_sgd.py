"""Average the parameters every few steps, instead of the gradients in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import define, field

from stratagem.api.validators import at_least
from stratagem_outer.outer_strategy import OuterStrategy
from stratagem_process_group.messages import average_in_place

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class LocalSGDStrategy(OuterStrategy):
    """Train replicas separately, and average their parameters every `period` steps.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; with `start_step` post-local SGD: Lin et al.,
    "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
    """

    path: ClassVar[str] = "strategy.local_sgd"

    #: Optimizer steps between two averages. A longer period sends less, and averages replicas that differ more.
    period: int = field(default=8, validator=at_least(1))
    #: Until this step the parameters are averaged after every step: early steps are large, and replicas would diverge.
    start_step: int = field(default=0, validator=at_least(0))

    def is_sync_step(self) -> bool:
        return self.steps <= self.start_step or (self.steps - self.start_step) % self.period == 0

    def sync(self, run: RunContext) -> None:
        average_in_place(self.local_parameters(), self.sync_group, run.device)
        self.parameters_in_sync = True
