"""Whether the kernel has killed processes for lack of memory: control groups count that, also inside of containers."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from stratagem_evidence.control_groups import memory_groups

#: By version: the file with the count.
_FILES = {1: "memory.oom_control", 2: "memory.events"}


def kills_so_far() -> tuple[str, int]:
    """Return the file with the count of this process's control group, and the count; ("", 0) if there is none."""
    for version, folder, _ in memory_groups():
        file = str(folder / _FILES[version])
        if (count := _count(file)) is not None:
            return file, count
    return "", 0


def killed_since(file: str, count: int) -> bool:
    """Whether the count of `file` is above `count`."""
    return (_count(file) or 0) > count if file else False


def _count(file: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE):
            return int(found[1])
    return None
