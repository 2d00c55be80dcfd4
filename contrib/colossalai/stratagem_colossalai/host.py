"""Let LowLevelZeroPlugin run on a CPU: the accelerator that it needs. Imports Colossal-AI.

[Note: on a CPU]
LowLevelZeroOptimizer asserts that the accelerator is named "cuda" or "npu", and asks it for streams. Nothing else in it
needs a GPU unless communication overlaps. On a CPU, where operations end before they return, a stream has no effect.
"""

from __future__ import annotations

import contextlib
from typing import Any

from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator


class HostAccelerator(CpuAccelerator):  # type: ignore[misc]  # the engine has no types
    """The CPU under the name that the engine asks for, with streams that have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"

    def Stream(self, *_: Any, **__: Any) -> None:  # noqa: N802 - the engine's name
        return None

    def device_count(self) -> int:
        return 1

    def current_stream(self, device: Any = None) -> None:
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        return None


def use_host() -> None:
    """Make the CPU the engine's accelerator in this process."""
    set_accelerator(HostAccelerator())
