"""The same plan on more or fewer nodes: what changes for one rank when the axis of different samples grows."""

from __future__ import annotations

from attrs import evolve

from stratagem_plan.cost import DATA_AXES
from stratagem_plan.plan_file import Collective, Plan, RankClass


def scaled(plan: Plan, nodes: int, *, strong: bool) -> Plan | None:
    """Return `plan` on this number of nodes, all of them for more or fewer ranks with different samples.

    What a rank computes in the optimizer's step stays, also where it would hold a smaller part of a sharded state.

    Args:
        strong: The samples of a step stay, so a rank has fewer; otherwise each rank has as many as before.

    Returns:
        None if a rank would have less than one sample or micro-batch, the ranks with different samples would not be a
        whole number, or no messages of the plan go between such ranks.
    """
    factor = nodes / plan.world.nodes
    part = 1 / factor if strong else 1.0
    microbatches = [each.bubble.microbatches for each in plan.classes if each.bubble]
    axis = _outermost(plan)
    if not axis or plan.data_ranks * factor % 1 or min([plan.inputs.samples, *microbatches]) * part < 1:
        return None
    return evolve(
        plan, world=evolve(plan.world, nodes=nodes, world_size=int(plan.world.world_size * factor)),
        inputs=evolve(plan.inputs, samples=int(plan.inputs.samples * part), tokens=int(plan.inputs.tokens * part)),
        data_ranks=int(plan.data_ranks * factor), accumulate=max(1, round(plan.accumulate * part)),
        classes=[_ranks(each, axis, factor, part, nodes == 1) for each in plan.classes],
    )  # fmt: skip


def _outermost(plan: Plan) -> str:
    """Return the axis that grows: of ranks with different samples, one that spans all nodes."""
    spanning = {
        message.axis for ranks in plan.classes for message in ranks.collectives
        if plan.world.nodes == 1 or not message.within_node
    }  # fmt: skip
    return next((axis for axis in DATA_AXES if axis in spanning), "")


def _ranks(ranks: RankClass, axis: str, factor: float, part: float, within_node: bool) -> RankClass:
    def message(each: Collective) -> Collective:
        if each.axis == axis:
            return evolve(each, ranks=max(1, round(each.ranks * factor)), within_node=within_node)
        return each if each.phase == "optimizer" or each.axis in DATA_AXES else evolve(each, calls=each.calls * part)

    return evolve(
        ranks,
        ranks=int(ranks.ranks * factor),
        work=[each if each.phase == "optimizer" else evolve(each, count=each.count * part) for each in ranks.work],
        collectives=list(map(message, ranks.collectives)),
        bubble=ranks.bubble and evolve(ranks.bubble, microbatches=max(1, int(ranks.bubble.microbatches * part))),
    )
