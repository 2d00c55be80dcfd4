"""The environment variables that tell a process its place."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import evolve

from stratagem.api.world import World

#: "1": whoever launched this process hosts the rendezvous store, and rank 0 joins it like the rest.
STORE_HOSTED_VARIABLE = "STRATAGEM_STORE_HOSTED"

#: The process that launched this one; it does not outlive it.
PARENT_VARIABLE = "STRATAGEM_PARENT_PID"

#: Where this process leaves the report of its error.
REPORTS_VARIABLE = "STRATAGEM_REPORTS"


# --- Places ------------------------------------------------------------------------------------------------------


def process_variables(world: World) -> dict[str, str]:
    """Return the environment variables that tell a process its place; an environment plugin reads them back."""
    variables = {
        "RANK": world.rank, "LOCAL_RANK": world.local_rank, "NODE_RANK": world.node_rank,
        "WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.local_world_size,
        "MASTER_ADDR": world.main_address, "MASTER_PORT": world.main_port,
        STORE_HOSTED_VARIABLE: int(world.store_hosted),
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def local_places(world: World) -> list[World]:
    """Return the places of all processes of this node, given local rank 0's."""
    return [evolve(world, rank=world.rank + offset, local_rank=offset) for offset in range(world.local_world_size)]


def child_environment(world: World, reports: Path) -> dict[str, str]:
    """Return the whole environment of a process that takes `world`'s place."""
    threads = max(1, (os.cpu_count() or 1) // world.local_world_size)
    return {
        "OMP_NUM_THREADS": str(threads), **os.environ, **process_variables(world),
        PARENT_VARIABLE: str(os.getpid()), REPORTS_VARIABLE: str(reports),
    }  # fmt: skip
