"""Say why the run failed if this process, which launched the others and trains, is ended by a signal.

[Note: watcher]
The launcher of a script is rank 0. gloo aborts it like any rank when another one sends a message of the wrong size, and
the kernel then ends the others: nobody is left to tell. So a shell of 1 MB waits until this process closes a
pipe, which the kernel does at any end. Only if no line came through the pipe before, it starts Python, which reads the
evidence of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

_SCRIPT = "trap '' INT TERM HUP; read -r _ && exit; exec \"$@\""
_TELL = (
    "import sys; from stratagem_evidence.kept import tell; tell(sys.argv[1], int(sys.argv[2]), sys.argv[3] == 'True')"
)


class Watcher:
    """Watches this process, rank `rank`, until it is dismissed."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        reader, self._writer = os.pipe()
        os.register_at_fork(after_in_child=self._close)  # a loader's worker would hold the pipe open
        signals = str(threading.current_thread() is threading.main_thread())  # only that one handles them
        words = ["/bin/sh", "-c", _SCRIPT, "sh", sys.executable, "-c", _TELL, str(folder), str(rank), signals]
        with contextlib.suppress(OSError):  # a machine without a shell: training needs no watcher
            self._shell = subprocess.Popen(words, stdin=reader)
        os.close(reader)

    def dismiss(self) -> None:
        """End it: this process says itself why it ends."""
        if self._shell is not None:
            with contextlib.suppress(OSError):
                os.write(self._writer, b"\n")
            self._shell.wait()
        self._close()

    def _close(self) -> None:
        self._shell = None
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
