"""The hook for uncaught errors and what listens to it; the summary of torchrun is one of these.

Python has one hook, `sys.excepthook`, and several parts of a run have something to do with an error that ends the
process: the launcher looks for its cause, a launched process reports it, the Trainer shortens its traceback. They all
`listen`; nothing else sets the hook.

Under torchrun an error in the configuration ends the output as one sentence, rather than as many tracebacks. Torchrun's
agent ends all processes when one fails, and prints a traceback of its own and a summary. A process tells the agent its
error through a file that the agent names in the environment; the summary, which comes last, then shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from stratagem.distributed.call_site import innermost_user_line
from stratagem.errors import CheckpointError, ConfigError, PluginError, is_echo

#: Gets an error that nothing has caught, and what prints it as if the listener were not there.
Listener = Callable[[BaseException, Callable[[], None]], None]

#: The file in which the agent looks for the error of a process.
_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
#: Errors whose sentence tells all; a traceback of others is of use.
SENTENCES = (ConfigError, PluginError, CheckpointError)


class _Hook:
    """What Python calls with an uncaught error: the listeners, the newest first, then the hook of the program."""

    def __init__(self) -> None:
        self.of_program: Any = sys.excepthook
        self.listeners: list[Listener] = []

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        waiting = [*self.listeners]

        def go_on() -> None:
            if waiting:
                waiting.pop()(error, go_on)
            else:
                self.of_program(kind, error, error.__traceback__)

        go_on()


#: The hook through which each listener is called. torch wraps the hook; what listens later than that is in another one.
_hooks: dict[Listener, _Hook] = {}


def listen(listener: Listener, *, beside_programs: bool = True) -> None:
    """Call `listener` with an error that ends this process, before those that listen already; once.

    Args:
        beside_programs: also where the program, or a library, has a hook of its own.
    """
    hook = sys.excepthook if isinstance(sys.excepthook, _Hook) else _Hook()
    if listener not in _hooks and (beside_programs or hook.of_program is sys.__excepthook__):
        hook.listeners.append(listener)
        sys.excepthook = _hooks[listener] = hook


def end_with_sentence() -> None:
    """Show an uncaught error of this process in torchrun's summary, and one in the configuration without a traceback.

    As torch's decorator ``@record`` does. Where the program has a hook of its own, that prints all errors.
    """
    if _FILE_VARIABLE in os.environ:
        listen(_print_sentence)


def _print_sentence(error: BaseException, print_error: Callable[[], None]) -> None:
    """Print one line on rank 0, where `error` is one in the configuration; other ranks leave it to the summary."""
    file, told = Path(os.environ[_FILE_VARIABLE]), False
    tells_all = isinstance(error, SENTENCES) and _hooks[_print_sentence].of_program is sys.__excepthook__
    where = innermost_user_line(error.__traceback__) if tells_all else ""
    sentence = f"{type(error).__name__}{f' in {where}' if where else ''}: {error}"
    # torchrun shows the earliest error: let that of the rank which caused the others come first.
    stack = {} if tells_all else {"py_callstack": "".join(traceback.format_exception(error))}
    about = {"timestamp": str(int(time.time()) + is_echo(error)), **stack}
    with contextlib.suppress(OSError):
        if tells_all or not (isinstance(error, KeyboardInterrupt) or file.exists()):  # `record` has written it already
            told = file.write_text(json.dumps({"message": {"message": sentence, "extraInfo": about}})) > 0
    if not (told and tells_all):
        print_error()
    elif os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr, flush=True)
