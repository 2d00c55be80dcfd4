"""The schedules by name: which stage a rank computes when, for which micro-batch, from torch's own tables."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from attrs import frozen
from torch.distributed.pipelining import schedules as torch_schedules

from stratagem.errors import ConfigError, nearest, shown


@frozen
class Schedule:
    """A row of the table of schedules."""

    name: str
    torch_name: str
    #: "single": a stage for each rank; "loop": rank r has the stages r, r + ranks ...; "v": r and 2 ranks - 1 - r.
    style: str
    #: The gradients of inputs and of weights are computed at different times.
    splits_backward: bool = False


SCHEDULES = {
    each.name: each
    for each in (
        Schedule("gpipe", "ScheduleGPipe", "single"),
        Schedule("1f1b", "Schedule1F1B", "single"),
        Schedule("interleaved_1f1b", "ScheduleInterleaved1F1B", "loop"),
        Schedule("looped_bfs", "ScheduleLoopedBFS", "loop"),
        Schedule("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", "loop", splits_backward=True),
        Schedule("zero_bubble_v", "ScheduleZBVZeroBubble", "v", splits_backward=True),
        Schedule("dualpipe_v", "ScheduleDualPipeV", "v", splits_backward=True),
    )
}


@frozen
class Action:
    """Something that a rank does in a schedule."""

    #: "F": forward; "B": backward; "I" and "W": backward of inputs, and of weights; "send_F", "recv_F", "send_B",
    #: "recv_B": activations and gradients.
    kind: str
    stage: int
    microbatch: int


def schedule_named(name: str) -> Schedule:
    """Return the schedule `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"strategy.parallel.schedule is {shown(name)}", expected=f"one of {', '.join(SCHEDULES)}",
            do=nearest(str(name), list(SCHEDULES)),
        )  # fmt: skip
    return SCHEDULES[name]


def stages_per_rank(schedule: Schedule) -> int:
    """Return how many stages a rank has, if `balance` does not tell."""
    return 1 if schedule.style == "single" else 2


def number_of_stages(options: Any, ranks: int) -> int:
    """Return how many stages the strategy's `options` make on `ranks`."""
    if not isinstance(options.balance, str):
        return len(options.balance)
    if options.split_points is not None:
        return len(options.split_points) + 1
    return stages_per_rank(schedule_named(options.schedule)) * ranks


def rank_of_stage(schedule: Schedule, stage: int, ranks: int) -> int:
    """Return the rank that computes `stage`."""
    return stage if schedule.style == "v" and stage < ranks else (
        2 * ranks - 1 - stage if schedule.style == "v" else stage % ranks
    )  # fmt: skip


def check_counts(schedule: Schedule, ranks: int, stages: int, microbatches: int) -> None:
    """Refuse numbers of stages and micro-batches that `schedule` cannot serve.

    Raises:
        ConfigError: with what it needs.
    """
    per_rank, rest = divmod(stages, ranks)
    allowed = {"single": per_rank == 1, "v": per_rank == 2, "loop": per_rank >= 1}[schedule.style]
    if rest or not allowed:
        expected = {"single": f"{ranks}", "v": f"{2 * ranks}", "loop": f"a multiple of {ranks}"}[schedule.style]
        raise ConfigError(
            f"strategy.parallel.schedule {schedule.name!r} on {ranks} processes got {stages} stages", expected=expected,
            do="give balance or split_points for as many stages, or choose another schedule",
        )  # fmt: skip
    found = f"strategy.parallel.microbatches is {microbatches} with schedule {schedule.name!r} and {stages} stages"
    least = {"1f1b": stages, "dualpipe_v": stages}.get(schedule.name, 1)
    if microbatches < least:
        raise ConfigError(found, expected=f"at least {least}", do="choose more micro-batches, or schedule 'gpipe'")
    if schedule.name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            raise ConfigError(found, expected=f"a multiple of {ranks}", do="choose another number of micro-batches")


@functools.lru_cache(maxsize=32)
def actions(name: str, ranks: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank does, in order, with the messages between ranks."""
    schedule = schedule_named(name)
    check_counts(schedule, ranks, stages, microbatches)
    with_messages: Any = torch_schedules._add_send_recv(
        _orders(schedule, ranks, stages, microbatches),
        stage_to_rank=functools.partial(rank_of_stage, schedule, ranks=ranks),
        num_stages=stages,
    )
    return tuple(tuple(each for a in with_messages[rank] for each in _plain(a)) for rank in range(ranks))


def computations(name: str, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    """Return what each rank computes, in order."""
    return [[each for each in of_rank if len(each.kind) == 1] for of_rank in actions(name, ranks, stages, microbatches)]


def _orders(schedule: Schedule, ranks: int, stages: int, microbatches: int) -> dict[int, list[Any]]:
    """Return torch's order of computations for each rank."""
    if schedule.name == "1f1b":
        return {rank: _order_1f1b(rank, stages, microbatches) for rank in range(ranks)}
    made = getattr(torch_schedules, schedule.torch_name)
    of_rank = [stage for stage in range(stages) if rank_of_stage(schedule, stage, ranks) == 0]
    given = [_stand_in(stage, stages, ranks) for stage in of_rank]
    table = made(given[0] if schedule.style == "single" else given, microbatches, loss_fn=lambda *_: None)
    computed = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B")
    return {
        rank: [each for each in order if each is not None and each.computation_type.name in computed]
        for rank, order in table.pipeline_order.items()
    }


def _order_1f1b(rank: int, stages: int, microbatches: int) -> list[Any]:
    """Return the order of 1F1B; torch's table of it begins the last stage with micro-batch 1, its own loop does not."""
    kind, warmup = torch_schedules._ComputationType, min(microbatches, stages - rank)
    forward = [torch_schedules._Action(rank, kind.FORWARD, index) for index in range(microbatches)]
    backward = [torch_schedules._Action(rank, kind.FULL_BACKWARD, index) for index in range(microbatches)]
    steady = [each for pair in zip(backward, forward[warmup:], strict=False) for each in pair]
    return forward[:warmup] + steady + backward[microbatches - warmup :]


def _stand_in(stage: int, stages: int, ranks: int) -> Any:
    """Return what a schedule of torch reads of a stage to make its table: without a process group."""
    return SimpleNamespace(
        stage_index=stage, num_stages=stages, group_size=ranks, group_rank=0, is_first=stage == 0,
        is_last=stage == stages - 1, has_backward=True, stage_index_to_group_rank={}, submod=None,
    )  # fmt: skip


#: Names of torch's kinds of computations and messages.
_KINDS = {
    "FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "SEND_F": "send_F",
    "RECV_F": "recv_F", "SEND_B": "send_B", "RECV_B": "recv_B",
}  # fmt: skip


def _plain(action: Any) -> list[Action]:
    if action.sub_actions is not None:
        return [each for part in action.sub_actions for each in _plain(part)]
    return [Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)]
