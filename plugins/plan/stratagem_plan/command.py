"""``stratagem plan``: what a script's training needs on devices that are not here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from stratagem.api import Command
from stratagem.errors import ConfigError
from stratagem_plan import page
from stratagem_plan.devices import check_counts, find
from stratagem_plan.plan_file import structure

if TYPE_CHECKING:
    from stratagem_plan.counted import Counted
    from stratagem_plan.script import PlannedScript

#: Exit codes beside 0, which says that the plan fits.
DOES_NOT_FIT, CANNOT_BE_PLANNED = 2, 3


class PlanCommand(Command):
    """The command ``stratagem plan``."""

    help = "count what a script's training needs on devices that are not here: memory, messages, FLOPs"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_cluster(parser)
        parser.add_argument(
            "--rank", type=int, action="append", help="plan this rank; again for several (default: one of each kind)"
        )
        parser.add_argument("--micro-batch", type=int, metavar="N", help="samples of a batch; those of a step stay")
        parser.add_argument("--largest-micro-batch", action="store_true", help="find the largest one that fits")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, for `stratagem simulate`")
        page.add_options(parser)
        parser.add_argument(
            "--measure", type=Path, metavar="FILE", help="write a device file of this machine, with its --devices"
        )
        parser.add_argument(
            "script", type=Path, nargs="?", help="the training script, which runs unchanged for two steps"
        )
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")

    def counted(self) -> Counted:
        """Return a plugin for a run with values on the CPU, which counts that run as a plan is counted."""
        from stratagem_plan.counted import Counted

        return Counted()

    def run(self, arguments: argparse.Namespace) -> int:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its fake process group warns
        from stratagem_plan.result import lines_of, misfit, verdict
        from stratagem_plan.variants import CannotBePlanned

        check_cluster(arguments)
        if arguments.measure:
            from stratagem_plan.measure import measure

            arguments.measure.write_text(measure(arguments.devices))
            return 0
        for rank in arguments.rank or ():
            if not 0 <= rank < arguments.devices * arguments.nodes:
                raise ConfigError(f"--rank is {rank}", expected=f"0 to {arguments.devices * arguments.nodes - 1}")
        device = find(arguments.device, arguments.device_file)
        limit = device.memory_bytes
        try:
            tree = _tree(arguments, limit)
        except CannotBePlanned as error:
            print(f"stratagem: cannot be planned: {error}", file=sys.stderr)
            return CANNOT_BE_PLANNED
        if arguments.json:
            arguments.json.write_text(json.dumps(tree, indent=1) + "\n")
        page.write(arguments, structure(tree, tree["script"]), device)
        print("\n".join(lines_of(tree, limit)))
        if limit is None:
            print(f"the memory of {arguments.device} is not known: whether it fits is not said")
            return 0
        print("\n".join(verdict(tree, limit)))
        return DOES_NOT_FIT if misfit(tree, limit) else 0

    @staticmethod
    def of(settings: Any, train: Callable[[], object], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plan of what a Trainer or a Run trains: see `stratagem_plan.call.plan_call`."""
        from stratagem_plan.call import plan_call

        return plan_call(settings, train, name, **options)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which cluster is planned for."""
    parser.add_argument("--devices", type=int, default=1, help="devices of each node (default: 1)")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--device", default="h100-sxm-80gb", help="their type (default: h100-sxm-80gb)")
    parser.add_argument("--device-file", type=Path, help="TOML file with figures of the device")
    parser.add_argument(
        "--assume", action="append", default=[], metavar="FILE.py:LINE=VALUE",
        help="the value of a tensor that this line asks for; again for several",
    )  # fmt: skip


def check_cluster(arguments: argparse.Namespace) -> None:
    """Refuse a cluster of no devices, a script that does not exist, and outputs that cannot be written."""
    check_counts("--", devices=arguments.devices, nodes=arguments.nodes)
    page.check(arguments)
    measures = getattr(arguments, "measure", None) is not None
    if measures == (arguments.script is not None):
        found = "--measure and a script were given" if measures else "no script was given"
        raise ConfigError(found, expected="stratagem plan [options] SCRIPT, or stratagem plan --measure FILE")
    if measures:
        return
    if not arguments.script.is_file():
        raise ConfigError(f"the script {str(arguments.script)!r} does not exist", do="check the path")


def _tree(arguments: argparse.Namespace, limit: float | None) -> dict[str, Any]:
    """Return the plan of one rank of each class, or of the ranks that were named."""
    from stratagem_plan.assumptions import read
    from stratagem_plan.micro_batches import divided
    from stratagem_plan.script import PlannedScript
    from stratagem_plan.variants import Variant, plan, plan_ranks

    assume = read(arguments.assume)
    cluster = arguments.devices, arguments.nodes, limit
    script = PlannedScript(arguments.script, arguments.arguments, *cluster, assume=assume)
    if arguments.micro_batch is not None:
        samples = plan(Variant(script=script, device=arguments.device))["inputs"]["samples"]
        script = divided(script, samples, arguments.micro_batch)
    tree = plan_ranks(Variant(script=script, device=arguments.device), arguments.rank)
    if arguments.largest_micro_batch:
        if limit is None:
            raise ConfigError(f"the memory of {arguments.device} is not known", do="pass --device-file with it")
        if not tree["inputs"]["samples"]:
            raise ConfigError(
                "--largest-micro-batch is set, and a step reads no samples",
                expected="batches of tensors with dimensions",
            )
        tree["largest_micro_batch"] = _largest(script, arguments.device, tree, limit)
    return tree


def _largest(script: PlannedScript, device: str, tree: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return the largest micro-batch with which all ranks of `tree` fit, as data; `accumulate` of the plan stays."""
    from stratagem_plan.micro_batches import MOST, largest
    from stratagem_plan.variants import Variant, micro_batch_of, peak_of, plan_ranks

    batches, ranks = tree["accumulate"], [each["rank"] for each in tree["classes"]]
    own = micro_batch_of(tree)
    peaks = {own: peak_of(tree)}
    base = sum(tree["classes"][0]["at_peak"][name] for name in ("parameters", "optimizer", "libraries"))
    search = largest(range(1, MOST), limit, own - 1, base)
    try:
        size = next(search)
        while True:
            if size not in peaks:
                sized = evolve(script, micro_batch=size, accumulate=batches)
                peaks[size] = peak_of(plan_ranks(Variant(script=sized, device=device), ranks))
            size = search.send(peaks[size])
    except StopIteration as end:
        best: int | None = end.value
    return {"size": best or 0, "peak": peaks.get(best or 0), "peak_of_next": peaks.get((best or 0) + 1)}
