"""The table of installed plugins: by kind, each with one sentence; presets are one line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stratagem.discovery.registry import Entry
from stratagem.stack.summaries import summary
from stratagem.stack.terminal_text import bold, width, wrapped

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
