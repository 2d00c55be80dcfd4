"""Every test of this folder needs a GPU, and is skipped for one reason: this machine has too few.

The marker says how many: one unless the test is marked ``gpu(2)``. On a machine without any, what does not need CUDA for
itself runs with STRATAGEM_TEST_DEVICE=cpu on the CPU; what does is marked ``gpu`` explicitly.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, unless they are to run on the CPU."""
    if os.environ.get("STRATAGEM_TEST_DEVICE", "cuda") != "cuda":
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def reproducible_products():
    """Products of matrices give the same bits each time: cuBLAS reads this when CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def released():
    """Give memory back between tests, so that each one counts its own."""
    import gc

    import torch

    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
