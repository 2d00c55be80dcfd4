"""``stratagem demo``: train a small GPT on the Python manual; see the module `gpt` for the example."""

from __future__ import annotations

import argparse
from pathlib import Path

import stratagem as sg


class Demo(sg.Command):
    """The command ``stratagem demo``."""

    help = "train a small GPT on the Python manual and generate text; run again to continue"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dir", type=Path, default=Path("demo_run"), help="checkpoints and logs (default: %(default)s)"
        )
        parser.add_argument(
            "--steps", type=int, help="optimizer steps of this run (default: 250, fewer on a slow machine)"
        )
        parser.add_argument("--batch-size", type=int, default=32, help="for each process (default: %(default)s)")
        parser.add_argument("--strategy", default="ddp", help="default: %(default)s")
        parser.add_argument("--precision", help="default: the faster of 32-true and bf16-mixed here")
        parser.add_argument("--devices", help="default: two processes on a CPU, all GPUs otherwise")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_demo.gpt import run

        run(
            arguments.dir, arguments.steps, arguments.batch_size, arguments.strategy, arguments.precision,
            arguments.devices,
        )  # fmt: skip
        return 0
