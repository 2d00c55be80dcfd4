"""``stratagem postmortem``: what each rank of a run did last, and why the run ended."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from stratagem.api import Command
from stratagem.errors import ConfigError

#: Exit code if the evidence does not tell why a run ended.
NO_VERDICT = 4


class Postmortem(Command):
    """The command ``stratagem postmortem``."""

    help = "tell why a run died or hung: the verdict, and what each rank did last"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "folder", type=Path, nargs="?", help="which the run named as it ended (default: the newest on this machine)"
        )
        parser.add_argument("--last", type=int, default=8, metavar="N", help="collectives of each group (default: 8)")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
        parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a timeline of all ranks")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_evidence import read_kept
        from stratagem_postmortem.page import page
        from stratagem_postmortem.tables import as_data, lines_of

        folder = arguments.folder or _newest()
        sentence, known = read_kept(folder)
        if not known:
            raise ConfigError(f"{folder} has no evidence of a run", expected="a folder that a run named as it ended")
        if arguments.json:
            arguments.json.write_text(json.dumps(as_data(sentence, known), indent=1) + "\n")
        if arguments.html:
            arguments.html.write_text(page(sentence, known))
        print("\n".join(lines_of(sentence, known, arguments.last)))
        return 0 if sentence else NO_VERDICT


def _newest() -> Path:
    mine = (path for path in Path(tempfile.gettempdir()).glob("stratagem-*") if path.stat().st_uid == os.getuid())
    folders = [path for path in mine if any(path.glob("*.ring"))]
    if not folders:
        raise ConfigError(
            f"no run on this machine has left evidence in {tempfile.gettempdir()}",
            do="give the folder that the run named as it ended",
        )
    return max(folders, key=lambda path: path.stat().st_mtime)
