"""Connect one process of a run with the others: checks of its place, collectives, groups of an outer strategy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve

from stratagem.api.capabilities import MULTI_PROCESS
from stratagem.api.validators import check_equal_nodes
from stratagem.api.world import Collectives, Mesh, World
from stratagem.discovery import registry
from stratagem.distributed.uncaught_errors import listen
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from stratagem.config.settings import RunSettings
    from stratagem.runtime.hook_caller import HookCaller
    from stratagem.stack.plugins import Stack

#: This process's place, once it is known, and whether it has met the others: they wait for it until then.
_place: World | None = None
_has_met = False


def tell_others_of_errors(world: World | None = None) -> None:
    """Have the ranks that wait for this one told of an error that ends it before all meet.

    For processes that the user or a scheduler started; where a launcher or an agent watches them, it ends the others.
    """
    global _place
    _place = world or _place
    if world.rank if world is not None else "MASTER_ADDR" in os.environ:
        listen(_tell_others)


def _tell_others(error: BaseException, print_error: Callable[[], None]) -> None:
    print_error()
    if not _has_met and isinstance(error, Exception):
        for meeting in registry.entries("meeting", hidden=True):
            meeting.load().tell(error, _place)


def join(world: World, stack: Stack, settings: RunSettings, hooks: HookCaller, device: torch.device) -> Collectives:
    """Join the other ranks, after all have met and compared their settings; return their collectives."""
    if world.world_size > 1:
        from stratagem.distributed.rendezvous import check_address
        from stratagem.stack.description import facts

        start = stack.timeouts().start
        if not world.store_hosted:
            check_address(world, start.total_seconds())
        identity = stack.accelerator.plugin.identity(device)
        may_share = any(choice.plugin.may_share_device() for choice in stack.strategies)
        global _has_met
        _has_met = True
        for meeting in registry.entries("meeting", hidden=True):
            meet = meeting.load().meet
            world = meet(world, facts(stack, settings), start, identity, may_share_device=may_share)
    collectives: Collectives = hooks.ask("connect", world=world)
    return collectives


def split_peers(collectives: Collectives, world: World, peers_world: World) -> Collectives:
    """Return the collectives over the ranks that the innermost strategy spreads the model over. Collective."""
    size, every = peers_world.world_size, range(world.world_size)
    teams = [list(every[first : first + size]) for first in every[::size]]
    return collectives.split(teams) if len(teams) > 1 else collectives


def split_readers(collectives: Collectives, mesh: Mesh) -> Collectives:
    """Return the collectives over ranks with different samples, or different parts of samples. Collective."""
    groups = mesh.lines(*(axis for axis in mesh.axes if axis not in ("pipeline", "tensor")))
    return collectives.split(groups) if len(groups) > 1 else collectives


def mesh_of(stack: Stack, world: World) -> Mesh:
    """Return the mesh of the innermost strategy, with an axis "team" around it under an outer one."""
    inner = peers_world_of(stack, world)
    mesh = stack.strategy.mesh(inner)
    if inner.world_size == world.world_size:
        return mesh
    return Mesh(axes={"team": world.world_size // inner.world_size, **mesh.axes}, rank=world.rank)


def peers_world_of(stack: Stack, world: World) -> World:
    """Return the place of `world` among the processes that the innermost strategy spreads the model over."""
    size = world.world_size
    for choice, inner in itertools.pairwise(stack.strategies):
        size = choice.plugin.processes_per_team(world, inner.plugin)
    if size == world.world_size:
        return world
    if size > 1 and world.num_nodes > 1:
        check_equal_nodes(world, f"{stack.strategies[0]} has teams of {size} processes", "set a team_size of 1")
    here = min(size, world.local_world_size)
    return evolve(
        world, rank=world.rank % size, world_size=size, local_rank=world.local_rank % here, local_world_size=here,
        num_nodes=size // here, node_rank=world.rank % size // here,
    )  # fmt: skip


def check_world(stack: Stack, world: World) -> None:
    """Refuse several processes for a strategy that would train each of them separately."""
    strategy = stack.strategies[-1]
    provided = {word for choice in stack.strategies for word in choice.plugin.capabilities.provides}
    if world.world_size > 1 and MULTI_PROCESS not in provided:
        raise ConfigError(
            f"{stack.environment} has {world.world_size} processes and {strategy} trains in one",
            expected="a strategy that provides 'multi-process'",
            do='choose one, such as the default (strategy="auto")',
        )
    if world.local_world_size > 1 and not strategy.plugin.process_per_device:
        raise ConfigError(
            f"{stack.environment} has {world.local_world_size} processes on this node, and {strategy} uses "
            "all devices of a node from one",
            expected="one process on each node",
        )
