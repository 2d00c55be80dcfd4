"""The strategy under other names, with options set."""

from __future__ import annotations

from attrs import evolve

from stratagem_ddp.strategy import DDPStrategy


def spawn() -> DDPStrategy:
    """``ddp_spawn``"""
    return DDPStrategy(start_method="spawn")


def fork() -> DDPStrategy:
    """``ddp_fork`` and ``ddp_notebook``"""
    return DDPStrategy(start_method="fork")


def find_unused() -> DDPStrategy:
    """``ddp_find_unused_parameters_true``"""
    return DDPStrategy(find_unused_parameters=True)


def no_unused() -> DDPStrategy:
    """``ddp_find_unused_parameters_false``"""
    return DDPStrategy(find_unused_parameters=False)


def spawn_find_unused() -> DDPStrategy:
    """``ddp_spawn_find_unused_parameters_true``"""
    return evolve(spawn(), find_unused_parameters=True)


def spawn_no_unused() -> DDPStrategy:
    """``ddp_spawn_find_unused_parameters_false``"""
    return evolve(spawn(), find_unused_parameters=False)


def fork_find_unused() -> DDPStrategy:
    """``ddp_fork_find_unused_parameters_true``, and the same for a notebook"""
    return evolve(fork(), find_unused_parameters=True)


def fork_no_unused() -> DDPStrategy:
    """``ddp_fork_find_unused_parameters_false``, and the same for a notebook"""
    return evolve(fork(), find_unused_parameters=False)
