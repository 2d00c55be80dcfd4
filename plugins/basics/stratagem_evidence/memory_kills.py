"""Whether the kernel has killed processes for lack of memory: control groups count that, also inside of containers."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def kills_so_far() -> tuple[str, int]:
    """Return the file with the count of this process's control group, and the count; ("", 0) if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "memory":
                file = _ROOT / "memory" / group.strip("/") / "memory.oom_control"
            elif not controllers:
                file = _ROOT / group.strip("/") / "memory.events"
            else:
                continue
            if (count := _count(str(file))) is not None:
                return str(file), count
    return "", 0


def killed_since(file: str, count: int) -> bool:
    """Whether the count of `file` is above `count`."""
    return (_count(file) or 0) > count if file else False


def _count(file: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE):
            return int(found[1])
    return None
