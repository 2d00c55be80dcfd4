"""Presets: names for the strategy with preset options."""

from __future__ import annotations

from attrs import evolve

from stratagem_ddp.strategy import DDPStrategy


def spawn() -> DDPStrategy:
    """Return the strategy ``ddp_spawn``."""
    return DDPStrategy(start_method="spawn")


def fork() -> DDPStrategy:
    """Return the strategy ``ddp_fork``, also named ``ddp_notebook``."""
    return DDPStrategy(start_method="fork")


def find_unused() -> DDPStrategy:
    """Return the strategy ``ddp_find_unused_parameters_true``."""
    return DDPStrategy(find_unused_parameters=True)


def no_unused() -> DDPStrategy:
    """Return the strategy ``ddp_find_unused_parameters_false``."""
    return DDPStrategy(find_unused_parameters=False)


def spawn_find_unused() -> DDPStrategy:
    """Return the strategy ``ddp_spawn_find_unused_parameters_true``."""
    return evolve(spawn(), find_unused_parameters=True)


def spawn_no_unused() -> DDPStrategy:
    """Return the strategy ``ddp_spawn_find_unused_parameters_false``."""
    return evolve(spawn(), find_unused_parameters=False)


def fork_find_unused() -> DDPStrategy:
    """Return the strategy ``ddp_fork_find_unused_parameters_true``, also named for ``ddp_notebook``."""
    return evolve(fork(), find_unused_parameters=True)


def fork_no_unused() -> DDPStrategy:
    """Return the strategy ``ddp_fork_find_unused_parameters_false``, also named for ``ddp_notebook``."""
    return evolve(fork(), find_unused_parameters=False)
