"""The environment variables that tell a process its ranks."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.api.world import World
from stratagem.errors import ConfigError

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
        "GROUP_WORLD_SIZE": world.num_nodes,
        "MASTER_ADDR": world.main_address, "MASTER_PORT": world.main_port,
        STORE_HOSTED_VARIABLE: int(world.store_hosted),
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def was_launched(variables: Mapping[str, str]) -> bool:
    """Return whether a launcher of this program started this process, or has started others beside it."""
    return STORE_HOSTED_VARIABLE in variables


def launched_world(variables: Mapping[str, str], local_size: int) -> World:
    """Return what `process_variables` tells a process for which `was_launched` is true.

    For environments that leave the start of a node's processes to a launcher.

    Args:
        local_size: the number of processes on this node that the run asks for.

    Raises:
        ConfigError: another number was launched.
    """
    world = World(
        rank=int(variables["RANK"]), local_rank=int(variables["LOCAL_RANK"]), node_rank=int(variables["NODE_RANK"]),
        world_size=int(variables["WORLD_SIZE"]), local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
        num_nodes=int(variables["GROUP_WORLD_SIZE"]), main_address=variables["MASTER_ADDR"],
        main_port=int(variables["MASTER_PORT"]), store_hosted=variables[STORE_HOSTED_VARIABLE] == "1",
    )  # fmt: skip
    if world.local_world_size != local_size:
        raise other_devices(world.world_size, local_size, world.num_nodes)
    return world


def other_devices(started: int | None, local_size: int, num_nodes: int) -> ConfigError:
    """Return the error for a run that asks for other processes than an earlier one of this program started."""
    if num_nodes > 1 and started == local_size:
        return ConfigError(
            f"devices is {local_size} in a process of a run with {started} processes on {num_nodes} nodes, as if the "
            f"script read WORLD_SIZE, which is '{started}'",
            expected="the processes of one node",
            do='leave devices at "auto"',
        )
    return ConfigError(
        f"an earlier run of this program started {started} processes, and this one has devices x num_nodes = "
        f"{local_size} x {num_nodes}",
        expected="the same number: those processes live until the program ends",
        do="give every Trainer of a program the same devices, or choose a launcher that forks or spawns for all of "
        'them: it starts new processes for each call (strategy="ddp_spawn")',
    )
