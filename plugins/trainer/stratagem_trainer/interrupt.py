"""What the program prints at an uncaught error: the user's frames, without those of the trainer.

An error whose sentence tells all is printed below the frames of the user's own code; with STRATAGEM_FULL_TRACEBACK=1
below all frames. Ctrl-C within a call of the trainer is one line.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from stratagem.distributed.call_site import innermost_user_line, is_users, package_of
from stratagem.distributed.uncaught_errors import SENTENCES, listen

#: Attribute of a KeyboardInterrupt that went through a call of the trainer.
_OF_A_CALL = "_ended_a_call_of_stratagem"
#: Environment variable that keeps the library's frames.
_ALL_FRAMES = "STRATAGEM_FULL_TRACEBACK"


def watch_uncaught() -> None:
    """Print uncaught errors as this module does; a hook of the program is left alone.

    Call it before the processes connect: torch then replaces the hook by one that calls it.
    """
    listen(_print_where, beside_programs=False)


def shorten_traceback(error: KeyboardInterrupt) -> None:
    """Have the program print one line for `error`, if nothing catches it. Its exit code stays the same."""
    vars(error)[_OF_A_CALL] = True


def _print_where(error: BaseException, print_error: Callable[[], None]) -> None:
    if _OF_A_CALL not in vars(error):
        if not os.environ.get(_ALL_FRAMES):
            _leave_users_frames(error)
        print_error()
    elif where := _where(error.__traceback__):
        print(f"KeyboardInterrupt in {where}", file=sys.stderr)


def _leave_users_frames(error: BaseException | None) -> None:
    """Take the library's frames from `error`, and from what it was raised from, where their sentences tell all."""
    while error is not None:
        if isinstance(error, SENTENCES):
            traces, kept = [error.__traceback__], None
            while (last := traces[-1]) is not None:
                traces.append(last.tb_next)
            for each in reversed([each for each in traces if each is not None and is_users(each.tb_frame.f_globals)]):
                kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
            error.__traceback__ = kept or error.__traceback__
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _where(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code; "" if the trainer raised the exception itself."""
    frames = list(traceback.walk_tb(trace))
    if frames and package_of(frames[-1][0].f_globals).startswith("stratagem"):
        return ""
    return innermost_user_line(trace)
