"""What a strategy tells people about its mesh: which rank holds what, what axes send, and when ranks wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, frozen


@frozen(kw_only=True)
class RankLayout:
    """What one rank holds."""

    rank: int
    #: Its index on each axis with more than one rank.
    position: Mapping[str, int]
    #: Layers of which it holds parameters, in the order of the model; consecutive ones may be one entry.
    layers: Sequence[str] = ()
    #: For each axis that cuts parameters: which part of which layers it holds.
    slices: Sequence[str] = ()
    #: Bytes of its parameters; None if they are not known yet.
    num_bytes: int | None = None


@frozen(kw_only=True)
class AxisMessages:
    """What one rank sends along one axis in a training step."""

    axis: str
    #: Number of ranks on the axis.
    size: int
    what: str
    #: None if it depends on the batch.
    num_bytes: float | None
    #: Whether the messages of a step were counted; otherwise `num_bytes` follows from the sizes of parameters.
    counted: bool = False


@frozen(kw_only=True)
class Slot:
    """A computation in a timeline."""

    start: int
    length: int
    #: "forward", "backward", "inputs" or "weights": the last two are parts of backward.
    kind: str
    microbatch: int
    stage: int


@frozen(kw_only=True)
class Timeline:
    """What each rank of a schedule computes when, if messages took no time."""

    schedule: str
    stages: int
    microbatches: int
    num_slots: int
    #: Of each rank of the schedule, in order.
    rows: Sequence[Sequence[Slot]]
    #: The share of time in which ranks wait, from 0 to 1.
    idle_share: float


@frozen(kw_only=True)
class Layout:
    """The mesh of a run and what is on it."""

    #: Sizes of the axes with more than one rank, outermost first.
    axes: Mapping[str, int]
    ranks: Sequence[RankLayout]
    messages: Sequence[AxisMessages] = ()
    timeline: Timeline | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def byte_text(num_bytes: float) -> str:
    """Return a number of bytes with a unit."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes:.0f} B"
