"""A network of its own for Ray, which listens on all addresses of a machine."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


@pytest.fixture(scope="session")
def network():
    """A network namespace that has only the loopback device, and folders of Ray's that no other cluster uses."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        pytest.skip("a network namespace can only be made by root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # names of sockets are limited to 107 characters
    variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ.update(variables)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
