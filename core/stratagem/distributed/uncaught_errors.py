"""Print an uncaught error in one line, with the line of the user's code that it is about.

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
from pathlib import Path
from types import TracebackType
from typing import Any

from stratagem.api.peer_errors import is_echo
from stratagem.errors import CheckpointError, ConfigError, PluginError

#: The file in which the agent looks for the error of a process.
_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
#: Packages whose frames say nothing about where a user's program was.
_NOT_THE_USERS = frozenset({"stratagem", "torch", "pluggy", "deepspeed", *sys.stdlib_module_names} - {"__main__"})
#: Errors whose sentence tells all; a traceback of others is of use.
SENTENCES = (ConfigError, PluginError, CheckpointError)
#: The hook that was in place before; None if this process has not set `print_sentence`.
_earlier_hook: Any = None


def end_with_sentence() -> None:
    """Show an uncaught error of this process in torchrun's summary, and one in the configuration without a traceback.

    As torch's decorator ``@record`` does. Where the program has a hook of its own, that prints all errors.
    """
    global _earlier_hook
    if _FILE_VARIABLE in os.environ and _earlier_hook is None:  # torch replaces it by a hook that calls this one
        _earlier_hook, sys.excepthook = sys.excepthook, print_sentence


def print_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line on rank 0, where `error` is one in the configuration; other ranks leave it to the summary."""
    file, told = Path(os.environ[_FILE_VARIABLE]), False
    tells_all = isinstance(error, SENTENCES) and _earlier_hook is sys.__excepthook__
    where = innermost_user_line(trace) if tells_all else ""
    sentence = f"{kind.__name__}{f' in {where}' if where else ''}: {error}"
    # torchrun shows the earliest error: let that of the rank which caused the others come first.
    stack = {} if tells_all else {"py_callstack": "".join(traceback.format_exception(error))}
    about = {"timestamp": str(int(time.time()) + is_echo(error)), **stack}
    with contextlib.suppress(OSError):
        if tells_all or not (isinstance(error, KeyboardInterrupt) or file.exists()):  # `record` has written it already
            told = file.write_text(json.dumps({"message": {"message": sentence, "extraInfo": about}})) > 0
    if not (told and tells_all):
        _earlier_hook(kind, error, trace)
    elif os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr, flush=True)


def innermost_user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of `trace` in the user's own code, as ``function (file:line)``; "" if there is none."""
    for frame, number in reversed(list(traceback.walk_tb(trace))):
        if is_users(frame.f_globals):
            return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{number})"
    return ""


def is_users(names: dict[str, Any]) -> bool:
    """Whether a module with the global `names` is the user's."""
    return package_of(names) not in _NOT_THE_USERS


def package_of(names: dict[str, Any]) -> str:
    """Return the outermost package of a module with the global `names`; "stratagem" for that of a plugin."""
    package = str(names.get("__name__", "")).partition(".")[0]
    return "stratagem" if package.startswith("stratagem_") else package
