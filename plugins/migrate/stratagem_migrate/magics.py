"""Hide the lines of a notebook's cells that are not Python: magics, shell commands and questions."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from typing import Final

#: Cell magics below which the rest of the cell is Python that the kernel runs.
_OF_PYTHON: Final = ("time", "timeit", "capture", "prun", "memit", "mprun")
#: ``%matplotlib inline``, ``!pip install x``, ``?len`` and ``len?``: the whole line.
_WHOLE: Final = re.compile(r"([ \t]*)([%!?].*|[^#'\"\s][^#'\"]*\?\s*)\Z", re.DOTALL)
#: ``files = !ls``: what follows the equals sign.
_ASSIGNED: Final = re.compile(r"([ \t]*[\w., \[\]]+=[ \t]*)([%!][^=\s].*)\Z", re.DOTALL)
_HIDDEN: Final = re.compile(r"(?:[ \t]*_stratagem_rest|_stratagem_magic)_(\d+)_")


class Magics:
    """Lines that are names in the script of a notebook, such as ``_stratagem_magic_0_``."""

    def __init__(self) -> None:
        self._hidden: list[str] = []

    def hide(self, cell: str) -> str:
        """Return a cell as Python, with as many lines; the whole of a cell in another language is one name."""
        magic = re.match(r"\s*%%(\w*)", cell)
        if magic is not None and magic[1] not in _OF_PYTHON:
            return self._name(cell)
        lines: list[str] = []
        waiting = iter(cell.split("\n"))
        for line in waiting:
            lines += self._hide_line(line, "\n".join(lines), waiting)
        return "\n".join(lines)

    def _hide_line(self, line: str, above: str, below: Iterator[str]) -> list[str]:
        """Return the line, and those that a backslash joins to it."""
        found = _WHOLE.match(line) or _ASSIGNED.match(line)
        if found is None or _continues(above):
            return [line]
        hidden = [found[1] + self._name(found[2])]
        indent = found[1] if found.re is _WHOLE else re.match(r"[ \t]*", line)[0]  # type: ignore[index]
        while line.endswith("\\") and (line := next(below, "")):
            hidden.append(indent + self._name(line, "rest"))
        return hidden

    def _name(self, text: str, kind: str = "magic") -> str:
        self._hidden.append(text)
        return f"_stratagem_{kind}_{len(self._hidden) - 1}_"

    def restore(self, text: str) -> str:
        """Return text with the hidden lines as they were."""
        return _HIDDEN.sub(lambda found: self._hidden[int(found[1])], text)

    def lines_of(self, name: str) -> list[str]:
        """Return the lines that are hidden behind a name; none if the name is of the script."""
        found = _HIDDEN.fullmatch(name)
        return self._hidden[int(found[1])].split("\n") if found is not None else []


def _continues(above: str) -> bool:
    """Whether the line after `above` is within a string, brackets or a statement that a backslash continues."""
    try:
        list(tokenize.generate_tokens(io.StringIO(above).readline))
    except (tokenize.TokenError, IndentationError):
        return True
    return above.endswith("\\")
