"""What all tests share: no environment left over from a launcher, and a folder of their own to work in."""

from __future__ import annotations

import os
import sys

import pytest

# Hundreds of tests start programs: each would compile these sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Several ranks under each of pytest's workers share the cores: more threads only wait for each other. torch reads this
# when it is imported, which pytest's plugins may already have done.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# torch asks for the name of every peer that connects: a name server that drops a question must not cost five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(autouse=True)
def clean_environment(unlaunched, monkeypatch, tmp_path):
    """A test begins as a process that nobody launched, in a folder of its own, and leaves no process group."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def deepspeed_preloaded():
    """Importing it takes seconds: once here, and not in each process that a test forks."""
    from stratagem_deepspeed import DeepSpeedStrategy

    DeepSpeedStrategy().preload("cpu")
