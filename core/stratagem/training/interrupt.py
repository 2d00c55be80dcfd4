"""What the program prints when Ctrl-C ends a call of the trainer: one line instead of the trainer's own frames."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

#: Attribute of a KeyboardInterrupt that went through a call of the trainer.
_OF_A_CALL = "_ended_a_call_of_stratagem"
#: Packages whose frames say nothing about where a user's program was.
_NOT_THE_USERS = frozenset({"stratagem", "torch", "pluggy", *sys.stdlib_module_names} - {"__main__"})


def shorten_traceback(error: KeyboardInterrupt) -> None:
    """Have the program print one line for `error`, if nothing catches it. Its exit code stays the same."""
    vars(error)[_OF_A_CALL] = True
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_where


def _print_where(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _OF_A_CALL not in vars(error):
        sys.__excepthook__(kind, error, trace)
    elif where := _where(trace):
        print(f"KeyboardInterrupt in {where}", file=sys.stderr)


def _where(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code; "" if the trainer raised the exception itself."""
    frames = list(traceback.walk_tb(trace))
    if frames and _package(frames[-1][0].f_globals).startswith("stratagem"):
        return ""
    for frame, number in reversed(frames):
        if _package(frame.f_globals) not in _NOT_THE_USERS:
            return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{number})"
    return ""


def _package(names: dict[str, Any]) -> str:
    """Return the outermost package of a module with the global `names`; "stratagem" for that of a plugin."""
    package = str(names.get("__name__", "")).partition(".")[0]
    return "stratagem" if package.startswith("stratagem_") else package
