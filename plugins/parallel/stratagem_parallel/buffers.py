"""Undo what a forward did to buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Undo, at the end, what was done to buffers, in place or not."""
    parts = [part for module in modules for part in module.modules()]
    names = [(part, dict(part._buffers)) for part in parts if part._buffers]
    buffers = {id(b): (b, b.clone()) for _, found in names for b in found.values() if b is not None and not b.is_meta}
    try:
        yield
    finally:
        for part, found in names:
            part._buffers.clear()
            part._buffers.update(found)
        for buffer, before in buffers.values():
            buffer.copy_(before)
