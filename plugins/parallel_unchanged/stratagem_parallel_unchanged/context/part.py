"""What is known of this rank's part of the sequences of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stratagem.api import Collectives
    from stratagem_parallel.context.attention import SequenceAttention
    from stratagem_parallel.context.losses import MeanOverAllTargets


class Part(Protocol):
    """A part of the sequences of the present batch, and the step that computes on it."""

    #: The ranks that hold the parts.
    over: Collectives
    #: The dimension that is cut.
    dim: int
    #: The number of positions of a part.
    length: int
    #: The number of samples of the present batch.
    samples: int
    attention: SequenceAttention
    losses: list[MeanOverAllTargets]
    #: The step uses `context_offset`.
    knows_offset: bool
    #: The step uses `context_mean` or `context_sum`.
    knows_sums: bool

    @property
    def is_running(self) -> bool:
        """Whether the step runs."""

    def buffers(self) -> set[int]:
        """Return the ids of the buffers of the model."""
