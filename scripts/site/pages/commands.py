"""The page of the program: the help of every subcommand, as `--help` prints it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from pages.text import anchor, required
from stratagem.cli import parser

INTRODUCTION = """# Commands

What `stratagem COMMAND --help` prints, for the commands of all packages of this repository.
"""


def page() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = "100"
    return "\n".join([INTRODUCTION, *_sections(parser(), 2)])


def _sections(command: argparse.ArgumentParser, level: int) -> Iterator[str]:
    required(command.description or command.prog, command.prog)
    if level > 2:
        yield f"{'#' * (level - 1)} `{command.prog}` {{ #{anchor(command.prog)} }}\n"
    yield f"```text\n{command.format_help().strip()}\n```\n"
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, child in action.choices.items():
                required(helps.get(name) or child.description, f"command {child.prog}")
                yield from _sections(child, level + 1)
