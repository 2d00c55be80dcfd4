"""Average with one or two other teams instead of all: a step does not wait for the slowest team."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from attrs import define, field

from stratagem.api.validators import at_least
from stratagem_outer.outer_strategy import OuterStrategy
from stratagem_process_group.messages import average_in_place

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.api import Collectives, RunContext


@define(eq=False, kw_only=True)
class DecentralizedStrategy(OuterStrategy):
    """Average the parameters of each rank with those of one or two peers, instead of with all ranks.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017. Replicas
    always differ; how much depends on the learning rate and on how fast the topology mixes parameters.
    """

    path: ClassVar[str] = "strategy.decentralized"

    #: "ring" averages with both neighbors (two teams: with the other one). "random" averages in pairs that are drawn
    #: again for each sync: half the messages, and faster mixing; with an odd number of teams one is left out.
    topology: Literal["ring", "random"] = "ring"
    #: Optimizer steps between two syncs.
    period: int = field(default=1, validator=at_least(1))

    def is_sync_step(self) -> bool:
        return self.steps % self.period == 0

    def sync(self, run: RunContext) -> None:
        mix = self._mix_with_partner if self.topology == "random" else _mix_with_both_neighbors
        average_in_place(self.local_parameters(), self.sync_group, run.device, mix)

    def _mix_with_partner(self, message: Tensor, group: Collectives) -> Tensor:
        other = partner(group.rank, group.world_size, self.steps)
        if other == group.rank:
            return message
        return message.add_(group.send_recv(message, to=other, source=other)).div_(2)


def _mix_with_both_neighbors(message: Tensor, group: Collectives) -> Tensor:
    left, right = (group.rank - 1) % group.world_size, (group.rank + 1) % group.world_size
    from_left = group.send_recv(message, to=right, source=left)
    if left == right:
        return message.add_(from_left).div_(2)
    from_right = group.send_recv(message, to=left, source=right)
    return message.add_(from_left).add_(from_right).div_(3)


def partner(rank: int, size: int, step: int) -> int:
    """Return the partner of `rank` after `step`; `rank` itself if it has none. All ranks draw the same pairs."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(step)).tolist()
    index = order.index(rank) ^ 1
    return order[index] if index < size else rank
