"""What a function takes."""

from __future__ import annotations

import inspect
from typing import Any


def takes(function: Any, count: int) -> bool:
    """Whether `function` accepts `count` positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
