"""``stratagem completion bash``: print a shell script that completes subcommands, options and plugin names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from stratagem.api import Command
from stratagem.api.options import option_types
from stratagem.config.settings import added_arguments
from stratagem.discovery import registry
from stratagem_fit.chosen_options import COMMANDS, of_chosen, options_by_choice
from stratagem_trainer.settings import TrainerSettings

SHELLS = ("bash", "zsh", "fish")

_INSTALL = """\
bash:  stratagem completion bash > ~/.local/share/bash-completion/completions/stratagem
zsh:   stratagem completion zsh > ~/.zfunc/_stratagem      (with ~/.zfunc in fpath, before compinit)
fish:  stratagem completion fish > ~/.config/fish/completions/stratagem.fish

The script has the plugins installed now: run it again after installing others.
"""


class Completion(Command):
    """The command ``stratagem completion``."""

    help = "print a shell script that completes commands, options and plugin names"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _INSTALL
        parser.add_argument("shell", choices=SHELLS)

    def run(self, arguments: argparse.Namespace) -> int:
        print(script(arguments.shell))
        return 0


def script(shell: str) -> str:
    """Return the completion script for `shell`, generated from all parsers of the program."""
    import shtab

    from stratagem.cli import parser

    program = parser()
    for name, command in _subparsers(program):
        _add_names(command)
        if name in COMMANDS:
            _add_run_file(command)
    return of_chosen(str(shtab.complete(program, shell=shell)), shell)


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield name, inner
                yield from _subparsers(inner)


def _add_names(parser: argparse.ArgumentParser) -> None:
    """Complete kinds and plugin names for arguments that take them, and files for arguments that take paths."""
    for action in parser._actions:
        if action.dest == "kind":
            action.choices = tuple(registry.kinds())
        elif action.dest == "name" and "plugins" in parser.prog and not parser.prog.endswith(" new"):
            action.choices = tuple(
                dict.fromkeys(entry.name for entry in registry.entries() if entry.kind in registry.kinds())
            )
        elif hasattr(action, "completions"):  # words that its command checks itself
            action.choices = action.completions
        elif action.dest in _PATHS and action.choices is None:
            _complete_files(action)


#: Names of arguments that are paths, in the parsers of the core and of the commands of this package.
_PATHS = ("file", "script", "html", "into")


def _complete_files(action: argparse.Action) -> None:
    import shtab

    action.complete = shtab.FILE  # type: ignore[attr-defined]


def _add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add the options that the reader of run files parses, for completion only."""
    for name in ("--model", "--data", "--seed"):
        parser.add_argument(name)
    _complete_files(parser.add_argument("--ckpt_path"))
    for name, annotation in option_types(TrainerSettings).items():
        action = parser.add_argument(f"--trainer.{name}", choices=_choices(name, annotation))
        if name in ("default_root_dir", "lock"):
            _complete_files(action)
    for name in added_arguments(TrainerSettings):
        parser.add_argument(f"--trainer.{name}", choices=_choices(name, Any))
    found: dict[str, Any] = {}
    for (kind, entry), options in options_by_choice().items():
        if isinstance(entry.load(), type):  # a preset sets some of them
            for name, annotation in options.items():
                found.setdefault(f"{kind}.{name}", annotation)
    for name, annotation in found.items():
        parser.add_argument(f"--trainer.{name}", choices=_choices("", annotation))


def _choices(name: str, annotation: Any) -> tuple[str, ...] | None:
    if name in registry.arguments():
        return tuple(dict.fromkeys(entry.name for entry in registry.entries(registry.arguments()[name])))
    if annotation is bool:
        return ("true", "false")
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else None
