"""Undo what a forward did to its modules."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from stratagem_transforms.forward_state import having, state_of


def unchanged(modules: list[nn.Module]) -> AbstractContextManager[None]:
    """Undo, at the end, what was done to buffers and to attributes, in place or not."""
    return having(state_of(dict.fromkeys(part for module in modules for part in module.modules())))
