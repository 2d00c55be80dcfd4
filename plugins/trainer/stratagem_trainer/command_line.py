"""The help of `Trainer.from_cli`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stratagem.config.settings import added_arguments
from stratagem.discovery import registry
from stratagem.stack.resolver import resolve
from stratagem_trainer.option_texts import as_written, help_lines, option_texts
from stratagem_trainer.sources import program

if TYPE_CHECKING:
    from stratagem_trainer.settings import TrainerSettings


def cli_help(settings: TrainerSettings) -> str:
    """Return the help of `Trainer.from_cli`: its arguments, and the options of the plugins that `settings` choose."""
    lines = [f"usage: {program()} [--config FILE] [--ARGUMENT VALUE] [--KIND.OPTION VALUE]", "", "arguments:"]
    for option in option_texts(type(settings)):
        lines += _help_lines("--", option)
    for name in added_arguments(type(settings)):
        kind = registry.kinds()[registry.arguments()[name]]
        title = f"the name of a stratagem.{kind.base.__name__}"
        option = {"name": name, "type": title, "default": "None", "doc": kind.doc}
        lines += _help_lines("--", option)
    for choice in resolve(settings).choices():
        if choice.kind in registry.dotted() and (texts := [*option_texts(type(choice.plugin), choice.plugin)]):
            lines += ["", f"options of {choice}:"]
            for option in texts:
                lines += _help_lines(f"--{choice.kind}.", option)
    return "\n".join(lines)


def _help_lines(start: str, option: Mapping[str, str]) -> list[str]:
    head = f"{start}{option['name']} ({option['type']}; default {as_written(option['default'])})"
    return help_lines(head, option["doc"])
