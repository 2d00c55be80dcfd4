"""Validators for option fields: ``rank: int = field(default=1, validator=at_least(1))``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError, shown

if TYPE_CHECKING:
    from stratagem.api.world import World

Validator = Callable[[Any, Any, Any], None]


def rule(holds: Callable[[Any], bool], expected: str) -> Validator:
    """Return a validator that accepts values for which `holds` is true, and None; other types fail the type check."""

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        try:
            fine = value is None or holds(value)
        except TypeError:
            return
        if not fine:
            raise ConfigError(f"{type(instance).__name__}.{attribute.name} is {shown(value)}", expected=expected)

    return validate


def at_least(low: float) -> Validator:
    """Accept numbers from `low` on."""
    return rule(lambda value: value >= low, f"at least {low}")


def more_than(low: float) -> Validator:
    """Accept numbers above `low`."""
    return rule(lambda value: value > low, f"more than {low}")


def _lasts(value: Any) -> bool:
    return bool((value.total_seconds() if isinstance(value, timedelta) else value) > 0)


#: Accept a duration of more than 0 seconds, as a number of seconds or a timedelta.
duration = rule(_lasts, "more than 0 seconds")

#: Accept anything but empty text, an empty list or an empty mapping.
not_empty = rule(lambda value: len(value) > 0, "a value that is not empty")


def between(low: float, high: float) -> Validator:
    """Accept numbers from `low` to `high`, both included."""
    return rule(lambda value: low <= value <= high, f"a number from {low} to {high}")


def check_equal_nodes(world: World, needed_by: str, do: str) -> None:
    """Refuse nodes with different numbers of processes, and ranks that go round them, for groups within a node.

    Args:
        needed_by: the option that makes such groups, with its value.
        do: what to set instead, besides starting as many processes on each node.

    Raises:
        ConfigError: on the ranks whose place shows it; the others are told when all ranks meet.
    """
    if world.num_nodes * world.local_world_size != world.world_size:
        found = f"{world.world_size} processes are on {world.num_nodes} nodes, {world.local_world_size} of them on this"
    elif world.rank != world.node_rank * world.local_world_size + world.local_rank:
        found = f"rank {world.rank} is local rank {world.local_rank} of node {world.node_rank}"
    else:
        return
    raise ConfigError(
        f"{needed_by}, and {found}", expected="as many processes on each node, ranked node by node", do=do
    )
