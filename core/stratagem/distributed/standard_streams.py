"""Standard input, output and error of this process, and its other files."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
import sys

#: The base of all files. Abstract ones such as io.IOBase keep what each class of the program is, which takes memory.
_FILE: type = io.IOBase.__base__  # type: ignore[assignment]


def open_standard_streams() -> None:
    """Open null streams for a program that was started without standard output or error (``>&-``, a service).

    Python has None for them, which has no methods; and the next file opened would take their number, and what a
    library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
            setattr(sys, name, stream)


def flush_files(*, on_disk: bool = False) -> None:
    """Write what is buffered of all files that this process opened, before an ``os._exit``, which would lose it.

    Not of files that were open when ``gc.freeze`` was called in a forked process: their buffers are the parent's.

    Args:
        on_disk: only of files on a disk, which do not wait for a reader, as a pipe does.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _FILE):
            with contextlib.suppress(Exception):  # it is closed, or for reading, or of a class of the user's
                if not on_disk or stat.S_ISREG(os.fstat(each.fileno()).st_mode):
                    each.flush()
    if not on_disk:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
