"""Tracebacks for a plugin's author: frames of the plugin, without those of the kit, the engine and torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

#: A frame in a traceback or in a dumped stack, with its lines of code.
_FRAME = re.compile(r'^  File "(.+?)", line .*\n?(?:    .*\n?)*', re.MULTILINE)


def files_of(cls: type) -> str:
    """Return the folder of the top-level package of `cls`, or its file; "?" for the kit, and where it has none."""
    if cls.__module__.partition(".")[0] == __package__:
        return "?"
    path, depth = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "?"), cls.__module__.count(".")
    depth += path.name == "__init__.py"
    return str(path.parents[depth - 1] if depth else path)


def only_of(files: Sequence[str], text: str) -> str:
    """Return `text`, of a `ProcessesFailed`, without frames outside `files`; a rank that has no others keeps all."""
    return "".join(_of_rank(tuple(files), rank) for rank in re.split(r"^(?=--- rank)", text, flags=re.MULTILINE))


def _of_rank(files: tuple[str, ...], text: str) -> str:
    if not any(frame[1].startswith(files) for frame in _FRAME.finditer(text)):
        return text
    return _FRAME.sub(lambda frame: frame[0] if frame[1].startswith(files) else "", text)
