"""Kernels of Jupyter for tests."""

from __future__ import annotations


def kernel(manager, folder):
    """Return an instance of the class `manager` for a kernel that is reached through sockets in `folder`.

    Over TCP the manager chooses ports, and the kernel binds them seconds later: another process may have them then.
    """
    return manager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
