"""What the program prints when Ctrl-C ends a call of the trainer: one line instead of the trainer's own frames."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

from stratagem.distributed.uncaught_errors import innermost_user_line, package_of, print_sentence

#: Attribute of a KeyboardInterrupt that went through a call of the trainer.
_OF_A_CALL = "_ended_a_call_of_stratagem"
#: The hook of the program before this one.
_earlier_hook: Any = sys.__excepthook__


def watch_uncaught() -> None:
    """Print uncaught errors that `shorten_traceback` has marked in one line; a hook of the program is left alone.

    Call it before the processes connect: torch and the launchers then replace the hook by hooks that call this one.
    """
    global _earlier_hook
    if sys.excepthook in (sys.__excepthook__, print_sentence):
        _earlier_hook, sys.excepthook = sys.excepthook, _print_where


def shorten_traceback(error: KeyboardInterrupt) -> None:
    """Have the program print one line for `error`, if nothing catches it. Its exit code stays the same."""
    vars(error)[_OF_A_CALL] = True


def _print_where(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _OF_A_CALL not in vars(error):
        _earlier_hook(kind, error, trace)
    elif where := _where(trace):
        print(f"KeyboardInterrupt in {where}", file=sys.stderr)


def _where(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code; "" if the trainer raised the exception itself."""
    frames = list(traceback.walk_tb(trace))
    if frames and package_of(frames[-1][0].f_globals).startswith("stratagem"):
        return ""
    return innermost_user_line(trace)
