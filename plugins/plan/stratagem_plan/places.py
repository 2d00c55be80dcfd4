"""Whose code a file is: the user's, a plugin's of stratagem, or a library's."""

from __future__ import annotations

import os
import sys

import torch


def is_of_a_library(path: str) -> bool:
    """Whether a file is of Python, torch or pluggy, or of this package."""
    folders = {os.path.dirname(module.__file__ or "") for module in (os, torch, sys.modules["pluggy"])} | {
        os.path.dirname(__file__)
    }
    return path.startswith(("<", *(f"{folder}/" for folder in folders)))


def is_ours(path: str) -> bool:
    """Whether a file is of a package of stratagem."""
    names = [name for name in sys.modules if name.startswith("stratagem")]
    return any(getattr(sys.modules[name], "__file__", None) == path for name in names)
