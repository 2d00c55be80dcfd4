"""The time, the scaling and the cost of a training run, from its plan."""

from __future__ import annotations

import math

from attrs import frozen

from stratagem_plan.cost import Interval, Step, assumptions, number_format, predict
from stratagem_plan.devices import Device
from stratagem_plan.plan_file import Plan
from stratagem_plan.scaling import scaled

#: Numbers of nodes to print, relative to the plan's.
_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


@frozen(kw_only=True)
class Scale:
    """The plan on another number of nodes."""

    nodes: int
    devices: int
    step_s: Interval
    inputs_per_s: Interval
    #: Inputs per second and device, relative to the plan's.
    efficiency: float


@frozen(kw_only=True)
class Saves:
    """How often to save a checkpoint."""

    #: Of the whole run.
    mtbf_s: float
    save_s: float
    every_s: float
    every_steps: int
    #: Time for saves, and for training again what was lost, relative to a run without failures.
    overhead: float


@frozen(kw_only=True)
class Simulation:
    """What `stratagem simulate` tells."""

    script: str
    device: str
    devices: int
    nodes: int
    #: "tokens", or "samples" if the plan counts no tokens.
    unit: str
    step_s: Interval
    parts_s: dict[str, float]
    #: All communication of the class of ranks that needs longest, hidden or not.
    communication_s: float
    inputs_per_s: Interval
    #: Model FLOPs by the devices' peak: three times those of forward; and all FLOPs, recomputation included.
    model_flops_utilization: Interval
    hardware_flops_utilization: Interval
    saves: Saves | None
    days: Interval | None
    device_hours: Interval | None
    cost: Interval | None
    weak_scaling: list[Scale]
    strong_scaling: list[Scale]
    assumptions: list[str]


def simulate(
    plan: Plan, device: Device, tokens: float | None = None, price: float | None = None, mtbf_s: float | None = None,
    save_s: float = 60.0,
) -> Simulation:  # fmt: skip
    """Return the prediction for `plan` on `device`; what needs an argument that is None is None, too."""
    step, step_s = predict(plan, device)
    inputs = _inputs(plan)
    rate = step_s.under(inputs)
    saves = mtbf_s and _saves(mtbf_s / plan.world.world_size, save_s, step_s.expected)
    slower = 1 + saves.overhead if saves else 1.0
    days = tokens and step_s.times(tokens / inputs * slower / 86400)
    hours = days and days.times(24 * plan.world.world_size)
    model, hardware = _utilization(plan, device)
    return Simulation(
        script=plan.script, device=device.name, devices=plan.world.world_size, nodes=plan.world.nodes,
        unit="tokens" if plan.inputs.tokens else "samples", step_s=step_s, parts_s=_parts(step),
        communication_s=step.communication, inputs_per_s=rate, model_flops_utilization=step_s.under(model),
        hardware_flops_utilization=step_s.under(hardware), saves=saves or None, days=days or None,
        device_hours=hours or None, cost=hours.times(price) if hours and price is not None else None,
        weak_scaling=_scaling(plan, device, strong=False), strong_scaling=_scaling(plan, device, strong=True),
        assumptions=assumptions(plan, device),
    )  # fmt: skip


def _inputs(plan: Plan) -> int:
    """Return the tokens, or else the samples, of one step of all ranks."""
    return (plan.inputs.tokens or plan.inputs.samples) * plan.data_ranks


def _parts(step: Step) -> dict[str, float]:
    names = ("forward", "backward", "optimizer", "exposed", "bubble", "host")
    return {name: getattr(step, name) for name in names}


def _utilization(plan: Plan, device: Device) -> tuple[float, float]:
    """Return model FLOPs and all FLOPs of a step, divided by the peak of the format that most of them have."""
    formats: dict[str, float] = {}
    forward = 0.0
    for ranks in plan.classes:
        for work in ranks.work:
            flops = work.count * work.flops_of_one * ranks.ranks
            formats[work.dtype] = formats.get(work.dtype, 0.0) + flops
            forward += flops if work.phase == "forward" else 0.0
    peak = device.need(f"flops.{number_format(max(formats, key=lambda name: formats[name]))}")
    return 3 * forward / peak / plan.world.world_size, sum(formats.values()) / peak / plan.world.world_size


def _saves(mtbf_s: float, save_s: float, step_s: float) -> Saves:
    """Return Daly's interval between checkpoints: Young's, with two terms more where saves are long."""
    ratio = save_s / (2 * mtbf_s)
    every = math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s if ratio < 1 else mtbf_s
    steps = max(1, round(every / step_s))
    every = steps * step_s
    return Saves(
        mtbf_s=mtbf_s, save_s=save_s, every_s=every, every_steps=steps,
        overhead=save_s / every + (every + save_s) / (2 * mtbf_s),
    )  # fmt: skip


def _scaling(plan: Plan, device: Device, *, strong: bool) -> list[Scale]:
    """Return the numbers of nodes that are possible, and what each device does there, relative to the plan's."""
    numbers = [plan.world.nodes * factor for factor in _FACTORS if device.inter or factor == 1]
    plans = [scaled(plan, int(nodes), strong=strong) for nodes in numbers if nodes >= 1 and nodes % 1 == 0]
    base = _inputs(plan) / predict(plan, device)[0].total / plan.world.world_size
    found = []
    for other in filter(None, plans):
        _, step_s = predict(other, device)
        rate, devices = step_s.under(_inputs(other)), other.world.world_size
        efficiency = rate.expected / devices / base
        scale = Scale(nodes=other.world.nodes, devices=devices, step_s=step_s, inputs_per_s=rate, efficiency=efficiency)
        found.append(scale)
    return found
