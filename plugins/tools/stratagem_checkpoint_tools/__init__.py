"""``stratagem checkpoint``: inspect, verify, compare and convert checkpoints of any installed format."""

from __future__ import annotations

import argparse

from stratagem import Command

_ONE_FILE = "full"


class Checkpoint(Command):
    """The command ``stratagem checkpoint``, with subcommands inspect, verify, diff, convert and consolidate."""

    help = "inspect, verify, compare and convert checkpoints"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        inspect = actions.add_parser("inspect", help="show tensors, optimizers, progress and versions")
        inspect.add_argument("path")
        verify = actions.add_parser("verify", help="exit with code 1 if it is incomplete or damaged")
        verify.add_argument("paths", nargs="+", metavar="path")
        diff = actions.add_parser("diff", help="exit with code 1 if two differ in names, shapes, dtypes or values")
        diff.add_argument("path")
        diff.add_argument("other")
        diff.add_argument("--tolerance", type=float, default=0.0, help="relative difference that counts as equal")
        convert = actions.add_parser("convert", help="write it in another format")
        consolidate = actions.add_parser("consolidate", help="write it as one file for torch.load")
        for action in (convert, consolidate):
            action.add_argument("path")
            action.add_argument("to", metavar="target", help="where to write; must not exist")
            action.add_argument(
                "--weights-only", action="store_true", help="only the model, without the state for resuming"
            )
            action.add_argument(
                "--rename", action="append", default=[], metavar="OLD=NEW",
                help="change the beginning of parameters' names, or what a regular expression matches; may be repeated",
            )  # fmt: skip
        convert.add_argument(
            "--to", dest="format",
            help="name of a checkpoint format, by default that of the suffix of target; huggingface (a folder of "
            "safetensors files) or state_dict (a file of torch.save) for weights alone",
        )  # fmt: skip
        convert.add_argument("--max-shard-size", help="size of a file with --to huggingface; by default 5GB")
        consolidate.set_defaults(format=_ONE_FILE, max_shard_size=None)
        for action in (inspect, diff, convert, consolidate):
            action.add_argument(
                "--trust", action="store_true", help="also load pickles, which can execute code: for files you trust"
            )
        for action in (inspect, verify, diff):
            action.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_checkpoint_tools.actions import convert, diff, inspect, verify

        actions = {"inspect": inspect, "verify": verify, "diff": diff, "convert": convert, "consolidate": convert}
        return actions[arguments.action](arguments)
