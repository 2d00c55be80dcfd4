"""Text for terminals: wrapped at their width, with bold headings; pipes and files get whole lines without colour."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

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
