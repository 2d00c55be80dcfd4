"""A comm hook for DDP: after some steps, average gradients within a node only, and parameters periodically."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, LOCAL_STEPS, TEAMS, Capabilities, Collectives, hookimpl
from stratagem.api.validators import at_least, check_equal_nodes
from stratagem.errors import ConfigError
from stratagem_buckets import CommHook
from stratagem_outer.diverging_replicas import DivergingReplicas
from stratagem_process_group.messages import average_in_place

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from stratagem.api import RunContext, World
    from stratagem_buckets import Bucket


@define(eq=False, kw_only=True)
class PostLocalSGD(DivergingReplicas, CommHook):
    """Averages gradients over all ranks until a given step, then within subgroups; parameters periodically over all.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
    """

    path: ClassVar[str] = "comm_hook.post_localsgd"
    innermost: ClassVar[bool] = True

    #: Optimizer steps between two averages of the parameters; must be set. A longer period sends less, and averages
    #: replicas that differ more.
    model_averaging_period: int | None = field(default=None, validator=at_least(1))
    #: Until this step gradients are averaged over all processes: early steps are large, and replicas would diverge.
    start_localSGD_iter: int = field(default=8, validator=at_least(0))  # noqa: N815 - torch's name
    #: Number of processes that average their gradients in every step. By default those of a node, as with torch's
    #: subgroup=None: on one node these are all processes, and parameters never differ.
    subgroup_size: int | None = field(default=None, validator=at_least(1))

    _subgroup: Collectives = field(init=False, factory=Collectives)

    capabilities = Capabilities(provides={TEAMS}, requires={GRADIENT_BUCKETS, LOCAL_STEPS}, conflicts={TEAMS})

    def __attrs_post_init__(self) -> None:
        if self.model_averaging_period is None:
            raise ConfigError(
                f"{self.path}.model_averaging_period is not set",
                expected="the number of optimizer steps between two averages of the parameters",
                do='pass comm_hook={"name": "post_localsgd", "model_averaging_period": 4}',
            )

    @hookimpl(wrapper=True)
    def connect(self, world: World) -> Generator[None, Collectives, Collectives]:
        size = self._size_of_subgroup(world)
        self.sync_group = collectives = yield
        if size == world.world_size:
            self._subgroup = collectives
            if world.rank == 0 and size > 1:
                warnings.warn(
                    f"{self.path}.subgroup_size is not set and all {size} processes are on one node, which is one "
                    "subgroup: gradients are averaged over all of them in every step, as with torch's subgroup=None, "
                    "and averaging parameters changes nothing; set subgroup_size to a divisor of that number",
                    stacklevel=2,
                )
        elif size > 1:
            ranks = range(world.world_size)
            self._subgroup = collectives.split([list(ranks[first : first + size]) for first in ranks[::size]])
        return collectives

    def _size_of_subgroup(self, world: World) -> int:
        if self.subgroup_size is None:
            check_equal_nodes(world, f"{self.path}.subgroup_size is not set, so a node is a subgroup", "set it")
        size = self.subgroup_size or world.local_world_size
        found = f"{self.path}.subgroup_size is {self.subgroup_size} and the run has {world.world_size} processes"
        if world.world_size % size:
            raise ConfigError(found, expected="a divisor of the number of processes")
        if size == self.subgroup_size == world.world_size:
            raise ConfigError(
                f"{found}, one subgroup: averaging parameters would change nothing",
                expected="at least two subgroups",
                do="set a smaller subgroup_size, start more processes, or drop the comm hook",
            )
        return size

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Generator[Any, Any, Tensor]:
        sent = self._subgroup.average_async(bucket.buffer) if self.diverges() else bucket.buffer
        average: Tensor = yield sent
        return average

    def diverges(self) -> bool:
        return self.steps >= self.start_localSGD_iter and self._subgroup is not self.sync_group

    def is_sync_step(self) -> bool:
        assert self.model_averaging_period is not None, "the constructor refuses None"
        diverged = self.steps - self.start_localSGD_iter
        return diverged > 0 and diverged % self.model_averaging_period == 0

    def sync(self, run: RunContext) -> None:
        mine = {} if self._subgroup is self.sync_group else self.local_parameters()
        average_in_place(mine, self.sync_group, run.device)
        self.parameters_in_sync = True
