"""``stratagem simulate``: the time, the scaling and the cost of a training run, from its plan file."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

from attrs import asdict, frozen

from stratagem.api import Command
from stratagem.errors import ConfigError
from stratagem_plan import page
from stratagem_plan.cost import Interval, Step, assumptions, number_format, predict
from stratagem_plan.devices import Device, find
from stratagem_plan.plan_file import Plan, read_plan
from stratagem_plan.scaling import scaled

#: Numbers of nodes to print, relative to the plan's.
_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4, 8)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Simulate(Command):
    """The command ``stratagem simulate``."""

    help = "predict the time, scaling and cost of a training run from its plan file"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("plan", type=Path, help="the file that `stratagem plan --json` wrote")
        parser.add_argument("--tokens", type=float, help="to train on; samples, if the plan counts no tokens")
        parser.add_argument("--price", type=float, help="of a device for an hour, in any currency")
        parser.add_argument("--mtbf", metavar="TIME", help="mean time between failures of one device, such as 50000h")
        parser.add_argument("--save-seconds", type=float, default=60.0, help="time of a checkpoint (default: 60)")
        parser.add_argument("--device", help="another device than the plan's")
        parser.add_argument("--device-file", type=Path, help="TOML file with figures of the device")
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
        page.add_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        plan = read_plan(arguments.plan)
        device = find(arguments.device or plan.device, arguments.device_file)
        mtbf_s = arguments.mtbf and _seconds(arguments.mtbf)
        result = simulate(plan, device, arguments.tokens, arguments.price, mtbf_s, arguments.save_seconds)
        if arguments.json:
            arguments.json.write_text(json.dumps(asdict(result, recurse=True), indent=1) + "\n")
        page.write(arguments, plan, device, result)
        _print(result)
        return 0


def _seconds(text: str) -> float:
    if match := re.fullmatch(r"([\d.]+(?:e\d+)?)([smhd])", text.strip()):
        return float(match[1]) * _UNITS[match[2]]
    raise ConfigError(f"--mtbf is {text!r}", expected="a number with s, m, h or d", do="use for example --mtbf 50000h")


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
    plan: Plan,
    device: Device,
    tokens: float | None = None,
    price: float | None = None,
    mtbf_s: float | None = None,
    save_s: float = 60.0,
) -> Simulation:
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
    numbers = [plan.world.nodes * factor for factor in _FACTORS]
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


# --- Text ------------------------------------------------------------------------------------------------------------


def _print(result: Simulation) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{result.script}: {result.devices:,} x {result.device}, nodes: {result.nodes:,}; expected (low to high)\n"
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in _lines(result):
        table.add_row(name, text)
    console.print(table)
    for title, scales in (("weak scaling", result.weak_scaling), ("strong scaling", result.strong_scaling)):
        table = Table("nodes", "devices", "step", f"{result.unit}/s", "efficiency", box=None, pad_edge=False)
        for each in scales:
            rate, step = _number(each.inputs_per_s.expected), _time(each.step_s)
            table.add_row(f"{each.nodes:,}", f"{each.devices:,}", step, rate, f"{each.efficiency:.0%}")
        if scales:
            console.print(f"\n{title}", table, sep="\n")
        else:
            console.print(f"\n{title}: unknown, no messages of the plan go between ranks with different samples")
    console.print("\nassumptions")
    for sentence in result.assumptions:
        console.print(f"  {sentence}", soft_wrap=True)


def _lines(result: Simulation) -> list[tuple[str, str]]:
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in result.parts_s.items() if seconds)
    lines = [
        ("step", _time(result.step_s)),
        ("", parts),
        ("communication", f"{result.communication_s:.3g} s, of which {result.parts_s['exposed']:.3g} s exposed"),
        (f"{result.unit}/s", _show(result.inputs_per_s)),
        ("MFU, without recomputation", _show(result.model_flops_utilization.times(100), " %")),
        ("HFU, with recomputation", _show(result.hardware_flops_utilization.times(100), " %")),
    ]
    if saves := result.saves:
        text = f"every {saves.every_s / 60:.3g} min or {saves.every_steps:,} steps, {saves.overhead:.1%} more time"
        text += f" (one failure in {saves.mtbf_s / 3600:.3g} h, {saves.save_s:.3g} s for a save)"
        lines.append(("checkpoint", text))
    for name, value in (("days", result.days), ("device hours", result.device_hours), ("cost", result.cost)):
        if value:
            lines.append((name, _show(value)))
    return lines


def _time(seconds: Interval) -> str:
    return _show(seconds.times(1e3), " ms") if seconds.expected < 1 else _show(seconds, " s")


def _show(value: Interval, unit: str = "") -> str:
    return f"{_number(value.expected)}{unit} ({_number(value.low)} to {_number(value.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
