"""``stratagem plan``: what a script's training needs on devices that are not here."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stratagem.api import Command
from stratagem.errors import ConfigError, StratagemError
from stratagem_plan import page
from stratagem_plan.devices import find
from stratagem_plan.plan_file import structure

#: Exit codes beside 0, which says that the plan fits.
DOES_NOT_FIT, CANNOT_BE_PLANNED = 2, 3


class PlanCommand(Command):
    """The command ``stratagem plan``."""

    help = "count what a script's training needs on devices that are not here: memory, messages, FLOPs"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--devices", type=int, default=1, help="devices of each node (default: 1)")
        parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
        parser.add_argument("--device", default="h100-sxm-80gb", help="their type (default: h100-sxm-80gb)")
        parser.add_argument("--device-file", type=Path, help="TOML file with figures of the device")
        parser.add_argument(
            "--rank", type=int, action="append", help="plan this rank; again for several (default: one of each kind)"
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, for `stratagem simulate`")
        page.add_options(parser)
        parser.add_argument("script", type=Path, help="the training script, which runs unchanged for two steps")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")

    def run(self, arguments: argparse.Namespace) -> int:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its fake process group warns
        from stratagem_plan.result import lines_of, misfit, verdict

        _check(arguments)
        device = find(arguments.device, arguments.device_file)
        limit = device.memory_bytes
        try:
            tree = _tree(arguments)
        except StratagemError as error:
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


def _check(arguments: argparse.Namespace) -> None:
    for name in ("devices", "nodes"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}", expected="at least 1")
    if not arguments.script.is_file():
        raise ConfigError(f"the script {str(arguments.script)!r} does not exist", do="check the path")
    size = arguments.devices * arguments.nodes
    for rank in arguments.rank or ():
        if not 0 <= rank < size:
            raise ConfigError(f"--rank is {rank}", expected=f"0 to {size - 1}")


def _tree(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of one rank of each class, or of the ranks that were named."""
    from stratagem_plan.result import tree_of
    from stratagem_plan.script import PlannedScript

    script = PlannedScript(arguments.script, arguments.arguments, arguments.devices, arguments.nodes)
    first, *others = arguments.rank or [0]
    with contextlib.redirect_stdout(sys.stderr):  # what the script prints
        planner = script.on(first)
    tree = tree_of(script, arguments.device, planner)
    if not arguments.rank:
        others = [alike[0] for alike in planner.classes if first not in alike]
    tree["classes"] += [each for rank in others for each in _in_a_process(arguments, rank)["classes"]]
    return tree


def _in_a_process(arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Return the plan of `rank`, from another process: this one has been a rank."""
    with tempfile.TemporaryDirectory(prefix="stratagem-plan-") as folder:
        path = Path(folder) / "plan.json"
        options = {
            "rank": rank, "devices": arguments.devices, "nodes": arguments.nodes, "device": arguments.device,
            "device-file": arguments.device_file, "json": path,
        }  # fmt: skip
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "stratagem", "plan", *words, str(arguments.script), *arguments.arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.is_file():
            raise StratagemError(f"rank {rank}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
        tree: dict[str, Any] = json.loads(path.read_text())
        return tree
