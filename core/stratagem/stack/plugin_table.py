"""The table of installed plugins: by kind, each with one sentence from its source, which is not imported.

Text is wrapped at the width of a terminal, with bold headings; pipes and files get whole lines without colour.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stratagem.discovery.registry import Entry

#: How many modules to follow from the one that an entry point names to the one that defines its class.
_MAX_HOPS = 4


class Summary(NamedTuple):
    """What the source of an entry point says."""

    #: The first sentence of its docstring, or a command's help; "" if there is none, or no source.
    text: str = ""
    #: Whether a function makes the plugin: a preset of another one.
    is_preset: bool = False


def summary(entry: Entry) -> Summary:
    """Return the sentence of the plugin of `entry`."""
    definition = _definition(entry)
    text = (_help(definition) if entry.kind == "command" else "") or _sentence(definition)
    return Summary(text, definition.startswith("def"))


def command_help(entry: Entry) -> str:
    """Return the attribute `help` of the command of `entry`; "" if its source does not have it as one string."""
    return _help(_definition(entry))


def _definition(entry: Entry) -> str:
    """Return the source from the class or function of `entry` on; "" if it is not found."""
    module, _, name = entry.value.partition(":")
    for _ in range(_MAX_HOPS):
        source = _source(module)
        if found := re.search(rf"^(class|def) {re.escape(name)}\b", source, re.MULTILINE):
            return source[found.start() :]
        if not (origin := _imported_from(source, module, name)):
            break
        module = origin
    return ""


def _help(definition: str) -> str:
    body = definition.partition("\nclass ")[0]
    found = re.search(r'^    help = "([^"\\\n]*)"$', body, re.MULTILINE)
    return found[1] if found else ""


def _sentence(definition: str) -> str:
    docstring = re.search(r"^[^\n]*?(?:\n(?!\s*\"\"\")[^\n]*){0,12}?\n\s+\"\"\"(.*?)\"\"\"", definition, re.DOTALL)
    text = " ".join(docstring[1].split()) if docstring else ""
    return text.split(". ")[0].rstrip(".")


def _imported_from(source: str, module: str, name: str) -> str:
    """Return the module from which `module` imports `name`; "" if it does not."""
    for found in re.finditer(r"^\s*from (\.*[\w.]+) import (\([^)]*\)|[^\n]*)", source, re.MULTILINE):
        if re.search(rf"\b{re.escape(name)}\b", found[2]):
            return found[1] if not found[1].startswith(".") else f"{module}.{found[1].lstrip('.')}"
    return ""


@cache
def _source(module: str) -> str:
    """Return the source of `module`, found without importing its package; "" if there is none."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin)
    for part in rest:
        path = path.parent / part / "__init__.py"
        if not path.exists():
            path = path.parent.with_suffix(".py")
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


# --- The table --------------------------------------------------------------------------------------------------------


#: A longer name gets a line of its own.
_LONGEST_NAME = 26
#: In a narrower terminal each name has a line of its own.
_ONE_LINE = 60


def plugin_table(entries: Sequence[Entry], *, presets: bool) -> str:
    """Return `entries`, sorted by kind, as text; presets are one line for each kind, or have rows with `presets`."""
    blocks = []
    for kind, group in itertools.groupby(entries, key=lambda entry: entry.kind):
        known = [(entry, summary(entry)) for entry in group]
        rows = [(entry, found.text) for entry, found in known if presets or not found.is_preset]
        folded = [entry.name for entry, found in known if found.is_preset and not presets]
        name_width = min(_LONGEST_NAME, max((len(entry.name) for entry, _ in rows), default=0))
        lines = [_row(entry, text, name_width) for entry, text in rows]
        if folded:
            lines.append(wrapped(f"presets (--presets describes them): {', '.join(folded)}", "  ", "      "))
        blocks.append("\n".join([bold(f"{kind}:"), *lines]))
    return "\n\n".join(blocks)


def _row(entry: Entry, text: str, name_width: int) -> str:
    text = f"{text or 'no description'} ({entry.distribution} {entry.version})"
    if (width() or _ONE_LINE) < _ONE_LINE:
        return f"  {entry.name}\n" + wrapped(text, "      ")
    return wrapped(text, f"  {entry.name:<{name_width}}  ", " " * (name_width + 4))


# --- Text for terminals -----------------------------------------------------------------------------------------------


#: The narrowest width that text is wrapped at.
_NARROWEST = 40


def width() -> int | None:
    """Return the columns to wrap at, those of the terminal; None for a pipe or a file."""
    return max(_NARROWEST, shutil.get_terminal_size().columns) if _is_terminal() else None


def bold(text: str) -> str:
    """Return `text` in bold in a terminal, unless NO_COLOR is set or the terminal is a dumb one."""
    styled = _is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[1m{text}\x1b[0m" if styled else text


def wrapped(text: str, first: str = "", rest: str | None = None) -> str:
    """Return `text` after `first`, wrapped where it is too long; the further lines begin with `rest`."""
    columns = width()
    if columns is None:
        return first + text
    indent = first if rest is None else rest
    return textwrap.fill(
        text, columns, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
