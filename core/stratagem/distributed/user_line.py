"""Find the line of the user's own code in a traceback."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

#: Packages whose frames say nothing about where a user's program was.
_NOT_THE_USERS = frozenset({"stratagem", "torch", "pluggy", *sys.stdlib_module_names} - {"__main__"})


def innermost_user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of `trace` in the user's own code, as ``function (file:line)``; "" if there is none."""
    for frame, number in reversed(list(traceback.walk_tb(trace))):
        if package_of(frame.f_globals) not in _NOT_THE_USERS:
            return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{number})"
    return ""


def package_of(names: dict[str, Any]) -> str:
    """Return the outermost package of a module with the global `names`; "stratagem" for that of a plugin."""
    package = str(names.get("__name__", "")).partition(".")[0]
    return "stratagem" if package.startswith("stratagem_") else package
