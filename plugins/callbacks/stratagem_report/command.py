"""``stratagem report``: draw the curves of a run that wrote metrics.csv."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratagem.api import Command


class ReportCommand(Command):
    """The command ``stratagem report``."""

    help = "draw the curves of a run on a page, from its metrics.csv"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "folder", type=Path, nargs="?", default=Path(), help="of a run, or a metrics.csv (default: this folder)"
        )
        parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: FOLDER/report.html)")
        parser.add_argument("--open", action="store_true", help="open the page in a browser")

    def run(self, arguments: argparse.Namespace) -> int:
        import webbrowser

        from stratagem_report.curves import files, joined
        from stratagem_report.page import KICKER, render_curves

        given = arguments.folder.resolve()
        folder = given.parent if given.is_file() else given
        history, sources = joined(files(given))
        page = (arguments.out or folder / "report.html").resolve()
        if not arguments.out and page.exists() and f">{KICKER}<" not in page.read_text(encoding="utf-8"):
            page = folder / "curves.html"  # a run wrote the other
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render_curves(history, folder.name, sources, str(folder)), encoding="utf-8")
        print(sources, page, sep="\n")
        if arguments.open:
            webbrowser.open(page.as_uri())
        return 0
