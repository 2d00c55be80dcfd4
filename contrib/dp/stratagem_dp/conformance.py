"""What the conformance kit needs to know of these strategies: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stratagem_testing import StrategyConformance


class DPConformance(StrategyConformance):
    """It has one process."""

    world_sizes = (1,)


class DDP2Conformance(StrategyConformance):
    """Each process is a node, with two devices."""

    test_a_plan_says_what_a_run_sends_and_holds: Any = None  # a plan's processes have a device each
    test_random_numbers_are_left_alone: Any = None  # parts draw one after the other, not as the whole batch does

    def choose(self, **arguments: Any) -> dict[str, Any]:
        return super().choose(**(arguments | {"devices": 2, "num_nodes": arguments.get("devices", 1)}))

    def run_in(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        return super().run_in(_as_the_only_one_of_a_node, world_size, function, *arguments)


def _as_the_only_one_of_a_node(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=str(rank), GROUP_RANK=str(rank))
    return function(rank, world_size, *arguments)
