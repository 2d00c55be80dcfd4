"""The help of `Trainer.from_cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.api.options import describe as describe_type
from stratagem.api.options import option_types, options, redact
from stratagem.config.settings import added_arguments
from stratagem.config.sources import program
from stratagem.discovery import registry
from stratagem.errors import shown
from stratagem.stack.describe import as_written, default_text, option_docs
from stratagem.stack.plugin_table import wrapped
from stratagem.stack.resolver import resolve

if TYPE_CHECKING:
    from stratagem_trainer.settings import TrainerSettings


def cli_help(settings: TrainerSettings) -> str:
    """Return the help of `Trainer.from_cli`: its arguments, and the options of the plugins that `settings` choose."""
    lines = [f"usage: {program()} [--config FILE] [--ARGUMENT VALUE] [--KIND.OPTION VALUE]", "", "arguments:"]
    docs, types = option_docs(type(settings)), option_types(type(settings))
    for name, option in options(type(settings)).items():
        lines += _help_lines(f"--{name}", describe_type(types[name]), default_text(option), docs.get(name, ""))
    for name in added_arguments(type(settings)):
        base = registry.kinds()[registry.arguments()[name]].base
        lines += _help_lines(f"--{name}", f"the name of a stratagem.{base.__name__}", "None", "")
    for choice in resolve(settings).choices():
        cls = type(choice.plugin)
        if choice.kind in registry.dotted() and options(cls):
            lines += ["", f"options of {choice}:"]
            for name, option in options(cls).items():
                value = shown(redact(name, getattr(choice.plugin, option.name)), None)
                doc = option_docs(cls).get(option.name, "")
                lines += _help_lines(f"--{choice.kind}.{name}", describe_type(option_types(cls)[name]), value, doc)
    return "\n".join(lines)


def _help_lines(flag: str, kind: str, default: str, doc: str) -> list[str]:
    heading = wrapped(f"{flag} ({kind}; default {as_written(default)})", "  ", "      ")
    return [heading, *([wrapped(doc, "      ")] if doc else [])]
