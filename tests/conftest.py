"""What all tests share: no environment left over from a launcher, and a folder of their own to work in."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def clean_environment(unlaunched, monkeypatch, tmp_path):
    """A test begins as a process that nobody launched, in a folder of its own, and leaves no process group."""
    monkeypatch.chdir(tmp_path)
