"""Standard input, output and error of this process."""

from __future__ import annotations

import os
import sys


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
