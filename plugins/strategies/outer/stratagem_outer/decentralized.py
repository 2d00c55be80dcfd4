"""Average with a neighbour or two instead of with everybody: no step waits for the slowest of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from attrs import define, field

from stratagem.api.validators import at_least
from stratagem_outer.messages import means
from stratagem_outer.outer_strategy import OuterStrategy

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.api import Collectives, RunContext


@define(eq=False, kw_only=True)
class DecentralizedStrategy(OuterStrategy):
    """Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017.

    Models differ all the time; how far depends on the learning rate and on how fast news travels in the topology.
    """

    path: ClassVar[str] = "strategy.decentralized"

    #: "ring" mixes with both neighbours, by thirds (two teams: by halves). "random" halves with one other, drawn anew
    #: for each meeting: half the messages, and news gets around in fewer steps; of an odd number one team rests.
    topology: Literal["ring", "random"] = "ring"
    #: Optimizer steps between two meetings.
    period: int = field(default=1, validator=at_least(1))

    def _meets(self) -> bool:
        return self._steps % self.period == 0

    def _meet(self, run: RunContext) -> None:
        mine = self._local()
        mix = self._with_partner if self.topology == "random" else _with_both_neighbours
        for name, mixed in means(mine, self._across, run.device, mix):
            mine[name].copy_(mixed)

    def _with_partner(self, message: Tensor, across: Collectives) -> Tensor:
        other = partner(across.rank, across.world_size, self._steps)
        if other == across.rank:
            return message
        return message.add_(across.send_recv(message, to=other, source=other)).div_(2)


def _with_both_neighbours(message: Tensor, across: Collectives) -> Tensor:
    left, right = (across.rank - 1) % across.world_size, (across.rank + 1) % across.world_size
    from_left = across.send_recv(message, to=right, source=left)
    if left == right:
        return message.add_(from_left).div_(2)
    from_right = across.send_recv(message, to=left, source=right)
    return message.add_(from_left).add_(from_right).div_(3)


def partner(rank: int, size: int, step: int) -> int:
    """Return whom `rank` meets after `step`; itself if it rests. All ranks draw the same pairs."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(step)).tolist()
    place = order.index(rank) ^ 1
    return order[place] if place < size else rank
