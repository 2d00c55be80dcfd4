"""Load `unchanged`, the second level, when a run needs it: the first level imports it nowhere else."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def tensor() -> ModuleType:
    """Return what cuts layers, and computes with activations of which each rank has a part."""
    from stratagem_parallel.unchanged import tensor

    return tensor


@cache
def sequences() -> ModuleType:
    """Return what finds operations that a part of a sequence gets wrong, and what models of Hugging Face are given."""
    from stratagem_parallel.unchanged import context

    return context


@cache
def tracing() -> ModuleType:
    """Return what cuts a model that is not an nn.Sequential into stages."""
    from stratagem_parallel.unchanged import tracing

    return tracing
