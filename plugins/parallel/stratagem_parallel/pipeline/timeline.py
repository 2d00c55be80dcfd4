"""What each rank of a pipeline computes when, and how long it waits: a picture and a number for each schedule."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from stratagem_parallel.pipeline.schedules import Action, computations, schedule_named, stages_per_rank

#: Slots that a computation takes, where forward of one stage takes one; the two parts of backward as long each.
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}


@frozen
class Timeline:
    """A schedule as a table of time slots, for computations that all take the same time and messages that take none."""

    schedule: str
    stages: int
    microbatches: int
    #: For each rank, for each slot: (kind, micro-batch, stage), or None where it waits. "B" takes two slots.
    rows: list[list[tuple[str, int, int] | None]]

    @property
    def idle_share(self) -> float:
        """The share of all slots in which ranks wait."""
        slots = [slot for row in self.rows for slot in row]
        return sum(slot is None for slot in slots) / len(slots)


def timeline(
    schedule: str, ranks: int, microbatches: int, stages: int | None = None, checkpoint: str = "never"
) -> Timeline:
    """Return the time slots of `schedule`.

    Args:
        schedule: its name in the option of that name.
        ranks: of the pipeline: the option `pipeline`.
        microbatches: of a batch.
        stages: in all; by default as many as the schedule needs.
        checkpoint: the option of that name.

    Raises:
        ConfigError: the schedule cannot serve these numbers.
    """
    stages = stages_per_rank(schedule_named(schedule)) * ranks if stages is None else stages
    again = {"always": microbatches, "except_last": microbatches - 1, "never": 0}[checkpoint]
    orders = [
        [_joined(each, again) for each in order if each.kind != "W" or each.microbatch >= again]
        for order in computations(schedule, ranks, stages, microbatches)
    ]
    ends: dict[Action, int] = {}
    rows: list[list[Any]] = [[] for _ in orders]
    position = [0] * len(orders)
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = sum(position)
        for rank, order in enumerate(orders):
            while position[rank] < len(order) and (start := _earliest(order[position[rank]], stages, ends)) is not None:
                action, row = order[position[rank]], rows[rank]
                row += [None] * (start - len(row))
                row += [(action.kind, action.microbatch, action.stage)] * SLOTS[action.kind]
                ends[action] = len(row)
                position[rank] += 1
        assert sum(position) > before, "torch's tables have no cycles"
    length = max(len(row) for row in rows)
    return Timeline(schedule, stages, microbatches, [row + [None] * (length - len(row)) for row in rows])


def _joined(action: Action, again: int) -> Action:
    """Return `action`; backward is not divided for the first `again` micro-batches, which compute forward again."""
    is_joined = action.kind == "I" and action.microbatch < again
    return Action("B", action.stage, action.microbatch) if is_joined else action


def _earliest(action: Action, stages: int, ends: dict[Action, int]) -> int | None:
    """Return the first slot in which what `action` needs exists; None if that is not known yet."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "W":
        return 0  # after "I" of this rank
    needed = (("F", stage - 1),) if kind == "F" else (("I", stage + 1), ("B", stage + 1))
    if not 0 <= needed[0][1] < stages:
        return 0
    found = [ends[each] for k, s in needed if (each := Action(k, s, microbatch)) in ends]
    return min(found, default=None)
