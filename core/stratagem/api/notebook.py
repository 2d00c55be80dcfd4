"""Whether this process serves a notebook."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Whether this process is an IPython kernel, whose script cannot be started again."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
