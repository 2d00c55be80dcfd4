"""What means over targets are divided by, where a rank sees only some of the targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

#: Those that run, the last innermost.
_changes: list[Callable[[Tensor], Tensor]] = []


@contextlib.contextmanager
def changed(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within: `divisor` returns what `change` makes of the number of targets."""
    _changes.append(change)
    try:
        yield
    finally:
        _changes.pop()


def divisor(number: Tensor) -> Tensor:
    """Return what to divide a sum over `number` targets by."""
    for change in reversed(_changes):
        number = change(number)
    return number
