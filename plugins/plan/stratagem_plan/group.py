"""Collectives of a world in which only this rank exists: what is sent is counted, and nothing arrives."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from attrs import evolve

from stratagem.api import Collectives, World
from stratagem.api.group_services import KeyValueStore
from stratagem.api.world import ReduceOp
from stratagem.distributed.process_group import TorchCollectives
from stratagem_plan.backend import NAME


class PlannedCollectives(TorchCollectives):
    """Collectives over torch's fake process group.

    Tensors on the planned device take the way of a run, over the fake group. Decisions travel as tensors of the CPU and
    as objects: all ranks are taken to say what this one says.
    """

    @classmethod
    def over_fake_group(cls, world: World, device: torch.device, timeout: timedelta) -> PlannedCollectives:
        """Return the collectives of all ranks of `world`."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        devices = dist.Backend.backend_capability["fake"]
        if NAME not in devices:
            devices.append(NAME)
        dist.init_process_group(
            f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=world.rank, world_size=world.world_size, timeout=timeout
        )
        return cls(world, device, owns_group=True, timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        if tensor.device.type == NAME:
            return super().all_reduce(tensor, op)
        self._count("all_reduce", tensor)
        return tensor * self.world_size if op == "sum" else tensor.clone()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.device.type == NAME:
            return super().all_gather(tensor)
        self._count("all_gather", tensor)
        return [tensor.clone()] * self.world_size

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return super().broadcast(tensor, src) if tensor.device.type == NAME else tensor

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        whole = dist.get_process_group_ranks(self.group)
        ranks = next(each for each in groups if self.rank in each)
        group = dist.new_group([whole[rank] for rank in ranks], backend="fake", use_local_synchronization=True)
        place = evolve(self._world, rank=list(ranks).index(self.rank), world_size=len(ranks))
        mine = type(self)(place, self.device, owns_group=False, group=group, timeout=self.timeout)
        mine.traffic = self.traffic
        return mine

    def duplicate(self, purpose: str) -> Self:
        return self

    def new_group(self) -> Self:
        return self

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def values(self, tensor: torch.Tensor, planned: Any) -> Any:
        return planned

    def barrier(self) -> None: ...

    def barrier_with_timeout(self, what: str, limit_s: float) -> None: ...

    def key_value_store(self, shared: bool = False) -> KeyValueStore:
        return KeyValueStore()
