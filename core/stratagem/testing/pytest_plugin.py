"""What pytest gets by itself where stratagem is installed: markers and fixtures. Imports torch only when used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

#: What launchers tell a process about its place.
LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", "slow: takes longer than a second")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and this machine has none"))


@pytest.fixture
def run_in_processes() -> Callable[..., list[Any]]:
    """`stratagem.testing.run_in_processes`: call a function in several gloo processes."""
    from stratagem.testing import run_in_processes

    return run_in_processes


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin the test as a process that nobody launched, and without settings from variables; leave no process group."""
    for name in [name for name in os.environ if name.startswith("STRATAGEM_")]:
        monkeypatch.delenv(name)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in LAUNCH_VARIABLES:  # a launcher under test sets them behind monkeypatch's back
        os.environ.pop(name, None)
    _leave_process_group()


def _leave_process_group() -> None:
    import gc
    import sys

    if "torch" not in sys.modules:
        return
    import torch

    torch.set_default_dtype(torch.float32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # a wrapped model must not outlive its process group
        torch.distributed.destroy_process_group()
