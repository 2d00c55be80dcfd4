"""A strategy around another one, which trains within teams: how ranks are divided into teams and sync groups."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from stratagem.api import MULTI_PROCESS, TEAMS, WITHIN_TEAM, Capabilities, Strategy, hookimpl
from stratagem.api.validators import at_least, check_equal_nodes, duration
from stratagem.errors import ConfigError
from stratagem_outer.diverging_replicas import DivergingReplicas

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import Collectives, RunContext, World


@define(eq=False, kw_only=True)
class OuterStrategy(DivergingReplicas, Strategy):
    """Teams of processes, each of which trains its own replica of the model between two syncs."""

    outer: ClassVar[bool] = True

    #: Number of processes that train one replica with the strategy inside. By default those of a node, or 1 if the
    #: strategy inside is for one process. Larger teams send gradients over more links, and there are fewer replicas.
    team_size: int | None = field(default=None, validator=at_least(1))
    #: How long a process waits for the others before it raises an error, in seconds or as a timedelta; by default
    #: 10 minutes over NCCL and 30 otherwise.
    timeout: timedelta | None = field(default=None, validator=duration)

    capabilities = Capabilities(provides={MULTI_PROCESS, TEAMS}, requires={WITHIN_TEAM}, conflicts={TEAMS})

    def __attrs_post_init__(self) -> None:
        given: Any = self.timeout
        if isinstance(given, int | float):
            self.timeout = timedelta(seconds=given)

    def timeouts(self) -> tuple[timedelta | None, timedelta | None]:
        return None, self.timeout

    def processes_per_team(self, world: World, inner: Strategy) -> int:
        trains_several = MULTI_PROCESS in inner.capabilities.provides
        if trains_several and self.team_size is None:
            check_equal_nodes(world, f"{self.path}.team_size is not set, so a node is a team", "set team_size to 1")
        size = self.team_size or (world.local_world_size if trains_several else 1)
        found = f"{self.path}.team_size is {size}{' by default' * (self.team_size is None)}"
        if size > 1 and not trains_several:
            raise ConfigError(
                found + " and the strategy inside it trains in one process",
                expected="1",
                do="drop team_size, or use a strategy for several processes inside",
            )
        if world.world_size % size:
            raise ConfigError(f"{found} and the run has {world.world_size} processes", expected="a divisor of that")
        if world.local_world_size % size and size % world.local_world_size:
            raise ConfigError(
                f"{found} and a node has {world.local_world_size} processes",
                expected="a divisor of that, or a multiple",
            )
        if size == world.world_size:
            raise ConfigError(
                f"{found}, which makes one team of the run's {world.world_size} process{'es' * (size > 1)}, with no "
                "other replica to average with",
                expected="at least two teams",
                do="start more processes, or set team_size to a divisor of their number",
            )
        return size

    @hookimpl(wrapper=True)
    def connect(self, world: World, run: RunContext) -> Generator[None, Collectives, Collectives]:
        collectives = yield
        size = run.peers_world.world_size
        self.sync_group = collectives.split([list(range(first, world.world_size, size)) for first in range(size)])
        self._first_of_group = world.rank % size
        return collectives
