"""``stratagem advise``: which strategy, precision, batch and checkpointing to train a script with, from its plans."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from stratagem.api import Command
from stratagem.errors import ConfigError, nearest
from stratagem_plan import page
from stratagem_plan.command import CANNOT_BE_PLANNED, DOES_NOT_FIT, add_cluster, check_cluster
from stratagem_plan.devices import find


class Advise(Command):
    """The command ``stratagem advise``."""

    help = "search strategy, precision, batch and checkpointing for a script on devices that are not here"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_cluster(parser)
        parser.add_argument("--search", metavar="WORDS", help="what may change, of: " + ",".join(_words()))
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
        page.add_options(parser)
        parser.add_argument("script", type=Path, help="the training script, which runs unchanged for two steps")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")

    def run(self, arguments: argparse.Namespace) -> int:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's fake process group warns
        check_cluster(arguments)
        searched = _searched(arguments.search)
        device = find(arguments.device, arguments.device_file)
        for key in ("memory_bytes", "memory_bytes_per_s"):
            device.need(key)
        from stratagem_plan.advice import lines_of, tree_of
        from stratagem_plan.assumptions import read
        from stratagem_plan.script import PlannedScript
        from stratagem_plan.search import Explorer
        from stratagem_plan.variants import CannotBePlanned

        assume = read(arguments.assume)
        cluster = arguments.devices, arguments.nodes, device.need("memory_bytes")
        script = PlannedScript(arguments.script, arguments.arguments, *cluster, assume=assume)
        explorer = Explorer(script=script, device=device, searched=searched)
        try:
            explorer.explore()
        except CannotBePlanned as error:
            print(f"stratagem: cannot be planned: {error}", file=sys.stderr)
            return CANNOT_BE_PLANNED
        print("\n".join(lines_of(explorer)))
        if arguments.json:
            arguments.json.write_text(json.dumps(tree_of(explorer), indent=1) + "\n")
        if page.wanted(arguments):
            from stratagem_plan.advice_page import drawn, text

            found = drawn(explorer)
            page.save(arguments, text(explorer, found), found)
        return 0 if explorer.fitting else DOES_NOT_FIT


def _words() -> tuple[str, ...]:
    from stratagem_plan.candidates import SEARCH

    return SEARCH


def _searched(text: str | None) -> frozenset[str]:
    known = _words()
    words = known if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(f"--search has {word!r}", expected=", ".join(known), do=nearest(word, known))
    return frozenset(words)
