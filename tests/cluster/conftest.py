"""Tests with the real scheduler, MPI, torchrun, network or notebook, on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def slurm(need):
    """Return a running `slurm.Slurm`; the tests that use it belong to ``xdist_group("slurm")``."""
    from slurm import PROGRAMS, Slurm

    need(*PROGRAMS, package="slurm-wlm", root=True)
    cluster = Slurm()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
