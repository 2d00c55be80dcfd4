"""The control groups of this process that count or limit memory, of both versions of Linux's interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_groups() -> Iterator[tuple[int, Path, Path]]:
    """Yield version, folder and topmost folder of each control group with this process's memory."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _ROOT / controllers
                yield 1 if controllers else 2, root / group.strip("/"), root
