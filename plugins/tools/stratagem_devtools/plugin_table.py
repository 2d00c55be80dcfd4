"""The table of installed plugins: by kind, each with one sentence from its source, which is not imported."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from stratagem.cli import command_help
from stratagem.discovery.registry import Entry, definition
from stratagem_devtools.conformance_results import stated
from stratagem_trainer.terminal import bold, width, wrapped

#: A longer name gets a line of its own.
_LONGEST_NAME = 26
#: In a narrower terminal each name has a line of its own.
_ONE_LINE = 60


class Summary(NamedTuple):
    """What the source of an entry point says."""

    #: The first sentence of its docstring, or a command's help; "" if there is none, or no source.
    text: str = ""
    #: Whether a function makes the plugin: a preset of another one.
    is_preset: bool = False


def summary(entry: Entry) -> Summary:
    """Return the sentence of the plugin of `entry`."""
    source = definition(entry)
    text = (command_help(entry) if entry.kind == "command" else "") or _sentence(source)
    return Summary(text, source.startswith("def"))


def row(entry: Entry) -> dict[str, str | None]:
    """Return the row of `stratagem plugins list --json` for one plugin."""
    names = ("kind", "name", "distribution", "version", "value")
    return {**{name: getattr(entry, name) for name in names}, "conformance": stated(entry)}


def plugin_table(entries: Sequence[Entry], *, presets: bool) -> str:
    """Return `entries`, sorted by kind, as text; presets are one line for each kind, or have rows with `presets`."""
    blocks = []
    for kind, group in itertools.groupby(entries, key=lambda entry: entry.kind):
        known = [(entry, summary(entry)) for entry in group]
        rows = [(entry, found.text) for entry, found in known if presets or not found.is_preset]
        folded = [entry.name for entry, found in known if found.is_preset and not presets]
        name_width = min(_LONGEST_NAME, max((len(entry.name) for entry, _ in rows), default=0))
        lines = [_table_row(entry, text, name_width) for entry, text in rows]
        if folded:
            lines.append(wrapped(f"presets (--presets describes them): {', '.join(folded)}", "  ", "      "))
        blocks.append("\n".join([bold(f"{kind}:"), *lines]))
    return "\n\n".join(blocks)


def _table_row(entry: Entry, text: str, name_width: int) -> str:
    result = stated(entry)
    text = f"{text or 'no description'} ({entry.distribution} {entry.version}{f'; checks: {result}' if result else ''})"
    if (width() or _ONE_LINE) < _ONE_LINE:
        return f"  {entry.name}\n" + wrapped(text, "      ")
    return wrapped(text, f"  {entry.name:<{name_width}}  ", " " * (name_width + 4))


def _sentence(source: str) -> str:
    docstring = re.search(r"^[^\n]*?(?:\n(?!\s*\"\"\")[^\n]*){0,12}?\n\s+\"\"\"(.*?)\"\"\"", source, re.DOTALL)
    text = " ".join(docstring[1].split()) if docstring else ""
    return text.split(". ")[0].rstrip(".")
