"""Run a program in a pseudo-terminal: wait for what it shows, press keys, read what the terminal displays."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from programs import scripts

#: What Ctrl-C sends.
CTRL_C = b"\x03"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")


class Terminal:
    """A program in a terminal of `columns` columns; a context manager that ends the program.

    Args:
        command: the program and its arguments.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path,
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._ours, theirs = os.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.process = scripts.Popen(
            command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=_take_terminal, env={**variables, "TERM": "xterm", **(environment or {})},
        )  # fmt: skip
        os.close(theirs)
        #: All that the program has written.
        self.raw = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """What the program has written, without colours and movements of the cursor; each redraw is a line."""
        return re.sub(r"\r+\n?", "\n", _ESCAPES.sub("", self.raw))

    def wait_for(self, pattern: str, limit_s: float = 120.0) -> None:
        """Read until `pattern` matches what the program has written.

        Raises:
            AssertionError: the program ended before, or wrote no such text within `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {limit_s:.0f} s:\n{self.text}"
            assert self._read(), f"no {pattern!r} before the program ended:\n{self.text}"

    def press(self, keys: bytes) -> None:
        """Press keys, such as `CTRL_C`."""
        os.write(self._ours, keys)

    def finish(self, limit_s: float = 120.0) -> int:
        """Read until the program has ended; return its exit code, negative for a signal."""
        deadline = time.monotonic() + limit_s
        while self._read():
            assert time.monotonic() < deadline, f"the program still runs:\n{self.text}"
        return self.process.wait(timeout=limit_s)

    def _read(self) -> bool:
        """Read what there is within a tenth of a second; return False at the end."""
        if not select.select([self._ours], [], [], 0.1)[0]:
            return True
        try:
            part = os.read(self._ours, 1 << 16)
        except OSError:  # all processes have closed the terminal
            return False
        self.raw += part.decode(errors="replace")
        return bool(part)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C sends SIGINT
