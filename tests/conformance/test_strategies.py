"""Every first-party strategy under the kit."""

from __future__ import annotations

import pytest
from torch import nn

from stratagem.testing import StrategyConformance


class TestSingleDevice(StrategyConformance):
    plugin = "single_device"


class TestDDP(StrategyConformance):
    plugin = "ddp"


class TestDDPFindUnused(StrategyConformance):
    plugin = "ddp_find_unused_parameters_true"
    world_sizes = (2,)


class TestDDPSharded(StrategyConformance):
    plugin = "ddp_sharded"


@pytest.mark.sweep
class TestDDPShardedOnFour(StrategyConformance):
    plugin = "ddp_sharded"
    world_sizes = (3, 4)


class TestFSDP(StrategyConformance):
    plugin = "fsdp"


class TestFSDPInUnits(StrategyConformance):
    plugin = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}, "activation_checkpointing_policy": {nn.Sequential}}  # noqa: RUF012
    world_sizes = (2,)


class TestFSDPShardGradOp(StrategyConformance):
    plugin = {"name": "fsdp", "sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": {nn.Linear}}  # noqa: RUF012
    world_sizes = (2,)


class TestFSDPNoShard(StrategyConformance):
    plugin = {"name": "fsdp", "sharding_strategy": "NO_SHARD"}  # noqa: RUF012
    world_sizes = (2,)


class TestFSDPOffload(StrategyConformance):
    plugin = "fsdp_cpu_offload"
    world_sizes = (2,)


@pytest.mark.sweep
class TestFSDPHybrid(StrategyConformance):
    plugin = {  # noqa: RUF012
        "name": "fsdp", "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "auto_wrap_policy": {nn.Linear},
    }  # fmt: skip
    world_sizes = (4,)


@pytest.mark.sweep
class TestFSDPOnFour(StrategyConformance):
    plugin = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}  # noqa: RUF012
    world_sizes = (3, 4)
