"""What all tests share: one thread, no environment left over from a launcher, and `processes` on the path."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """A test begins as a process that nobody launched, in a folder of its own, and leaves no process group."""
    for name in [name for name in os.environ if name.startswith("STRATAGEM_")]:
        monkeypatch.delenv(name)
    for name in _LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    for name in _LAUNCH_VARIABLES:  # a launcher under test sets them behind monkeypatch's back
        os.environ.pop(name, None)
    if "torch" in sys.modules:
        import torch

        torch.set_default_dtype(torch.float32)
        gc.collect()  # a wrapped model must not outlive its process group
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and this machine has none"))
