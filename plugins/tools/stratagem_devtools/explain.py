"""``stratagem explain``: show what a script would run, without starting a process."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stratagem import Command
from stratagem.api.options import option_types
from stratagem.discovery import registry
from stratagem.errors import ConfigError, StratagemError, shown
from stratagem_devtools.mesh_text import mesh_lines

if TYPE_CHECKING:
    from stratagem.config.settings import RunSettings
    from stratagem.stack.plugins import Stack
    from stratagem_layout import Layout

#: Set while the script runs: the run that it launches first calls `Explain.show`, and stops.
_VARIABLE = "STRATAGEM_EXPLAIN"


class Explain(Command):
    """The command ``stratagem explain``, and what a run calls to explain itself."""

    help = "show what a script would run, without starting a process"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument("script", help="path of the script")
        rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
        rest.required = False  # the message about a missing script must name nothing else

    def run(self, arguments: argparse.Namespace) -> int:
        import runpy

        os.environ[_VARIABLE] = "json" if arguments.json else "text"
        sys.argv = [arguments.script, *arguments.arguments]
        if not os.path.exists(arguments.script):
            raise StratagemError(f"script {arguments.script!r} does not exist", do="check the path")
        if os.path.isdir(arguments.script):
            raise StratagemError(f"{arguments.script!r} is a folder", expected="a Python script", do="check the path")
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))
        try:
            runpy.run_path(arguments.script, run_name="__main__")
        except SystemExit as stop:
            return int(stop.code or 0)
        finally:
            del os.environ[_VARIABLE]
        raise StratagemError(f"{arguments.script} ended without launching a run", expected="a fit, or Run.launch")

    @staticmethod
    def text(description: dict[str, Any], assigns: str = " = ") -> str:
        """Return the `description` of a run as a tree; `assigns` stands between a name and its value."""
        processes = description["processes"]
        count, nodes = processes["per_node"], processes["nodes"]
        lines = ["1 process" if count == 1 else f"{count} processes"]
        lines[0] += " on 1 node" if nodes == 1 else f" on each of {nodes} nodes"
        if len(processes["devices"]) != processes["per_node"]:
            lines[0] += f", each with {len(processes['devices'])} devices"
        lines += [
            f"  {name}{assigns}{entry['value']}  ({entry['origin']})"
            for name, entry in description["arguments"].items()
        ]
        for plugin in description["plugins"]:
            package = f"{plugin['distribution']} {plugin['version']}" if plugin["distribution"] else "no package"
            lines.append(f"+ {plugin['kind']} {plugin['name']}  ({package}; {plugin['reason']})")
            lines += [f"|   {o['name']}{assigns}{o['value']}  ({o['origin']})" for o in plugin["options"]]
            for title in ("provides", "requires", "conflicts", "answers", "wraps", "acts"):
                if plugin[title]:
                    lines.append(f"|   {title}: {', '.join(plugin[title])}")
            if plugin["absorbed"]:
                lines.append("|   its hooks are not called: the strategy applies this precision itself")
        return "\n".join(lines)

    @classmethod
    def show(cls, run: Any, layout: Layout | None, form: str) -> None:
        """Print what `run` would do, as "text" or "json"; on stderr, words of the command line that it does not use."""
        if form not in ("text", "json"):
            raise ConfigError(f"{_VARIABLE} is {form!r}", expected="'text' or 'json'", do="unset it to train")
        for sentence in unread_arguments(run.stack, run.settings, sys.argv[1:]):
            print(f"stratagem: {sentence}", file=sys.stderr)
        if form == "json":
            run.print(json.dumps(run.describe() | ({"layout": layout.as_dict()} if layout else {}), indent=2))
        else:
            run.print("\n".join([cls.text(run.describe()), *(mesh_lines(layout) if layout else [])]))


def unread_arguments(stack: Stack, settings: RunSettings, words: Sequence[str]) -> list[str]:
    """Return a sentence for each Trainer argument in `words` of the command line that the run does not use."""
    sentences = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, text = word.removeprefix("--").partition("=")
        text = text if equals else "" if following.startswith("--") else following
        name, dot, option = name.replace("-", "_").partition(".")
        if (
            not word.startswith("--")
            or not text
            or name not in (registry.dotted() if dot else option_types(type(settings)))
        ):
            continue
        choices = [choice for choice in stack.choices() if choice.kind == registry.arguments().get(name, name)]
        if dot:
            values = [
                (getattr(choice.plugin, option, None), choice.origins.get(option, "default")) for choice in choices
            ]
        else:
            origin = settings.origins.get(name, "default")
            values = [(choice.name, origin) for choice in choices] or [(getattr(settings, name), origin)]
        if any(origin == "command line" or str(value).lower() == text.lower() for value, origin in values):
            continue
        used = " and ".join(f"{shown(value)} ({origin})" for value, origin in values) or "nothing"
        error = ConfigError(
            f"the command line has {word if equals else f'{word} {text}'} and the run uses {used}",
            expected="a script that reads it",
            do="create the trainer with stratagem.Trainer.from_cli(), or pass the value to Trainer(...)",
        )
        sentences.append(str(error))
    return sentences
