"""Load the package stratagem_parallel_unchanged when a run needs it: the strategy imports it nowhere else."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from stratagem.errors import ConfigError


def check(needed_for: str) -> None:
    """Refuse an option that needs the package, if it is not installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("stratagem_parallel_unchanged") is None:
        raise ConfigError(
            f"strategy.parallel.{needed_for} needs the package stratagem-parallel-unchanged, which is not installed",
            do='pip install "stratagem-parallel[unchanged]"',
        )


@cache
def tensor() -> ModuleType:
    """Return what cuts layers, and computes with activations of which each rank has a part."""
    from stratagem_parallel_unchanged import tensor

    return tensor


@cache
def sequences() -> ModuleType:
    """Return what finds operations that a part of a sequence gets wrong, and what models of Hugging Face are given."""
    from stratagem_parallel_unchanged import context

    return context
