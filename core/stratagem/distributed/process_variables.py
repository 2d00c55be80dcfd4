"""The environment variables that tell a process its ranks."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import evolve

from stratagem.api.world import World

#: "1": the launcher hosts the rendezvous store, and rank 0 connects to it like the other ranks.
STORE_HOSTED_VARIABLE = "STRATAGEM_STORE_HOSTED"

#: Id of the process that launched this one; this process ends when that one ends.
PARENT_VARIABLE = "STRATAGEM_PARENT_PID"

#: Folder for the report of this process's error.
REPORTS_VARIABLE = "STRATAGEM_REPORTS"


# --- Ranks -------------------------------------------------------------------------------------------------------


def process_variables(world: World) -> dict[str, str]:
    """Return the environment variables that tell a process its ranks; an environment plugin reads them."""
    variables = {
        "RANK": world.rank, "LOCAL_RANK": world.local_rank, "NODE_RANK": world.node_rank,
        "WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.local_world_size,
        "MASTER_ADDR": world.main_address, "MASTER_PORT": world.main_port,
        STORE_HOSTED_VARIABLE: int(world.store_hosted),
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def local_places(world: World) -> list[World]:
    """Return the `World` of each process of this node, given that of local rank 0."""
    return [evolve(world, rank=world.rank + offset, local_rank=offset) for offset in range(world.local_world_size)]


def child_environment(world: World, reports: Path) -> dict[str, str]:
    """Return the complete environment for a process with the ranks of `world`."""
    threads = max(1, (os.cpu_count() or 1) // world.local_world_size)
    return {
        "OMP_NUM_THREADS": str(threads), **os.environ, **process_variables(world),
        PARENT_VARIABLE: str(os.getpid()), REPORTS_VARIABLE: str(reports),
    }  # fmt: skip
