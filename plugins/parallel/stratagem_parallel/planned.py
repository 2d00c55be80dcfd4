"""Describe what a run will put on its mesh before any process starts, from the options and the whole model."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from torch import nn

from stratagem.api import Collectives, Mesh
from stratagem_layout import Slot, Timeline
from stratagem_parallel.description import Held, described, expected_messages
from stratagem_parallel.pipeline import ownership, timeline
from stratagem_parallel.pipeline.schedules import number_of_stages, rank_of_stage, schedule_named
from stratagem_parallel.pipeline.stages import cut
from stratagem_parallel.plan import plan_of

if TYPE_CHECKING:
    from stratagem_layout import Layout

#: The kinds of computations by torch's letters.
_KINDS = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
#: How many slots a computation of each kind takes.
_SLOTS = timeline.SLOTS


def layout(options: Any, mesh: Mesh, module: nn.Module | None, times: Timeline | None) -> Layout | None:
    """Return the layout of `mesh`, with what each rank will hold of `module`; None if there is one rank.

    Raises:
        ConfigError: an option does not fit the model, as the run would tell.
    """
    world_size = math.prod(mesh.axes.values())
    if world_size == 1:
        return None
    by_rank: list[Held | None] = [None] * world_size
    stages = None if module is None else _stages(options, mesh, module)
    if module is not None and stages is not None:
        tensor, alone = mesh.size("tensor"), mesh.size("expert") == 1
        cut = plan_of(module, options.plan, tensor, with_experts=alone)[0] if tensor > 1 else {}
        by_rank = [_held(Mesh(axes=mesh.axes, rank=rank), module, stages, set(cut)) for rank in range(world_size)]
    num_bytes = max((has.num_bytes for has in by_rank if has is not None), default=0)
    return described(mesh, by_rank, module, expected_messages(mesh, num_bytes), times)


def timeline_of(options: Any, mesh: Mesh) -> Timeline | None:
    """Return the timeline of the schedule that `options` choose; None without a pipeline."""
    ranks = mesh.size("pipeline")
    if ranks == 1:
        return None
    stages = number_of_stages(options, ranks)
    found = timeline.timeline(options.schedule, ranks, options.microbatches or stages, stages, options.checkpoint)
    rows = [_slots(row) for row in found.rows]
    return Timeline(
        schedule=found.schedule, stages=found.stages, microbatches=found.microbatches, num_slots=len(found.rows[0]),
        rows=rows, idle_share=found.idle_share,
    )  # fmt: skip


def _slots(row: list[tuple[str, int, int] | None]) -> list[Slot]:
    slots, position = [], 0
    while position < len(row):
        cell = row[position]
        if cell is None:
            position += 1
            continue
        kind, microbatch, stage = cell
        slots.append(Slot(start=position, length=_SLOTS[kind], kind=_KINDS[kind], microbatch=microbatch, stage=stage))
        position += _SLOTS[kind]
    return slots


def _stages(options: Any, mesh: Mesh, module: nn.Module) -> dict[str, frozenset[int]] | None:
    """Return the positions on `pipeline` that use each tensor of `module`; {} if all do, None if a run decides it."""
    ranks = mesh.size("pipeline")
    if ranks == 1:
        return {}
    if options.balance == "balance_by_time":
        return None
    rank_of = functools.partial(rank_of_stage, schedule_named(options.schedule), ranks=ranks)
    return ownership.uses(module, cut(module, options, number_of_stages(options, ranks), Collectives()), rank_of)


def _held(place: Mesh, module: nn.Module, stages: dict[str, frozenset[int]], cut: set[str]) -> Held:
    layers, num_bytes, seen = [], 0.0, set[nn.Parameter]()
    slices: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        own = {
            f"{name}.{key}" if name else key: parameter
            for key, parameter in part.named_parameters(recurse=False)
            if parameter not in seen
        }
        own = {key: parameter for key, parameter in own.items() if _is_here(place, key, stages)}
        if not own:
            continue
        layers.append(name)
        seen.update(own.values())
        axes = [axis for axis, cuts in (("tensor", name in cut), ("shard", place.size("shard") > 1)) if cuts]
        for axis in axes:
            slices.setdefault(axis, []).append(name)
        num_bytes += sum(parameter.nbytes for parameter in own.values()) / math.prod(map(place.size, axes))
    return Held(tuple(layers), {axis: tuple(names) for axis, names in slices.items()}, round(num_bytes))


def _is_here(place: Mesh, name: str, stages: dict[str, frozenset[int]]) -> bool:
    return name not in stages or place.position("pipeline") in stages[name]
