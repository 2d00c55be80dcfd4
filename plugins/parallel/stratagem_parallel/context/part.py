"""What is known of this rank's part of the sequences of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional as F  # noqa: N812

from stratagem_parallel.context.attention import SequenceAttention
from stratagem_parallel.context.losses import MeanOverAllTargets
from stratagem_parallel.target_numbers import LOSSES

if TYPE_CHECKING:
    from stratagem.api import Collectives

#: The parts whose steps run in this process; the last one computes.
running: list[Part] = []


class Part:
    """A part of the sequences of the present batch, and the step that computes on it.

    Args:
        over: the ranks that hold the parts.
        dim: the dimension that is cut.
        method: how attention is computed.
    """

    def __init__(self, over: Collectives, dim: int, method: str) -> None:
        self.over, self.dim = over, dim
        #: The number of positions of a part.
        self.length = 0
        #: The number of samples of the present batch.
        self.samples = 0
        self.attention = SequenceAttention(F.scaled_dot_product_attention, over, method)
        self.losses = [MeanOverAllTargets(loss, over) for loss in LOSSES]
        replaced: list[Any] = [self.attention, *self.losses]
        for each in replaced:
            each.is_active = lambda: self.is_running
        #: The model.
        self.module: Any = None
        #: The step that runs uses `context_offset`, and `context_mean` or `context_sum`.
        self.knows_offset = self.knows_sums = False
        #: The step that runs uses `local_attention`: it is another computation than that of whole sequences.
        self.is_local = False

    @property
    def is_running(self) -> bool:
        """Whether the step runs."""
        return bool(running) and running[-1] is self
