"""``stratagem simulate``: the time, the scaling and the cost of a training run, from its plan file."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from attrs import asdict

from stratagem.api import Command
from stratagem.errors import ConfigError
from stratagem_pictures.scales import number
from stratagem_plan import page
from stratagem_plan.devices import find
from stratagem_plan.plan_file import read_plan
from stratagem_plan.simulate import Simulation, simulate

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
        page.check(arguments)
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
            rate, step = number(each.inputs_per_s.expected), each.step_s.time()
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
        ("step", result.step_s.time()),
        ("", parts),
        ("communication", f"{result.communication_s:.3g} s, of which {result.parts_s['exposed']:.3g} s exposed"),
        (f"{result.unit}/s", result.inputs_per_s.words()),
        ("MFU, without recomputation", result.model_flops_utilization.times(100).words(" %")),
        ("HFU, with recomputation", result.hardware_flops_utilization.times(100).words(" %")),
    ]
    if saves := result.saves:
        text = f"every {saves.every_s / 60:.3g} min or {saves.every_steps:,} steps, {saves.overhead:.1%} more time"
        text += f" (one failure in {saves.mtbf_s / 3600:.3g} h, {saves.save_s:.3g} s for a save)"
        lines.append(("checkpoint", text))
    for name, value in (("days", result.days), ("device hours", result.device_hours), ("cost", result.cost)):
        if value:
            lines.append((name, value.words()))
    return lines
