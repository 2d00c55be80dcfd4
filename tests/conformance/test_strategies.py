"""Every first-party strategy under the kit."""

from __future__ import annotations

import pytest
from stratagem_dp import conformance
from torch import nn

from stratagem_testing import StrategyConformance


class TestSingleDevice(StrategyConformance):
    plugin = "single_device"


class TestDDP(StrategyConformance):
    plugin = "ddp"


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDDPFindUnused(StrategyConformance):
    plugin = "ddp_find_unused_parameters_true"
    world_sizes = (2,)


@pytest.mark.when_changed(
    "plugins/ddp_sharded/",
    "plugins/libraries/",
    "plugins/testing/",
    guard="tests/conformance/test_strategies.py::TestDDP",
)
class TestDDPSharded(StrategyConformance):
    plugin = "ddp_sharded"


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDDPShardedOnOtherSizes(StrategyConformance):
    plugin = "ddp_sharded"
    world_sizes = (3, 4)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestFSDP(StrategyConformance):
    plugin = "fsdp"


class TestFSDPInUnits(StrategyConformance):
    plugin = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}, "activation_checkpointing_policy": {nn.Sequential}}  # noqa: RUF012


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestFSDPShardGradOp(StrategyConformance):
    plugin = {"name": "fsdp", "sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": {nn.Linear}}  # noqa: RUF012
    world_sizes = (2,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestFSDPNoShard(StrategyConformance):
    plugin = {"name": "fsdp", "sharding_strategy": "NO_SHARD"}  # noqa: RUF012
    world_sizes = (2,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestFSDPOffload(StrategyConformance):
    plugin = "fsdp_cpu_offload"
    world_sizes = (2,)
    unplannable = "strategy.fsdp.cpu_offload is True"


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestFSDPHybrid(StrategyConformance):
    plugin = {  # noqa: RUF012
        "name": "fsdp", "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "auto_wrap_policy": {nn.Linear},
    }  # fmt: skip
    world_sizes = (4,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestFSDPOnOtherSizes(StrategyConformance):
    plugin = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}  # noqa: RUF012
    world_sizes = (1, 3, 4)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDeepSpeedWithoutZeRO(StrategyConformance):
    plugin = {"name": "deepspeed", "stage": 0}  # noqa: RUF012
    world_sizes = (2,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDeepSpeedStage1(StrategyConformance):
    plugin = "deepspeed_stage_1"


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDeepSpeedStage2(StrategyConformance):
    plugin = "deepspeed_stage_2"
    world_sizes = (2,)


@pytest.mark.when_changed("plugins/deepspeed/", guard="tests/conformance/test_strategies.py::TestDDP")
class TestDeepSpeedStage3(StrategyConformance):
    plugin = "deepspeed_stage_3"
    world_sizes = (2,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDeepSpeedStage3Alone(StrategyConformance):
    plugin = "deepspeed_stage_3"
    world_sizes = (1,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDeepSpeedOffload(StrategyConformance):
    plugin = "deepspeed_stage_3_offload"
    world_sizes = (2, 3)


@pytest.mark.when_changed("contrib/dp/", guard="tests/conformance/test_strategies.py::TestDDP")
class TestDP(conformance.DPConformance):
    plugin = "dp"


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestDPOnThreeDevices(TestDP):
    """One process; its batches are cut in three."""

    test_a_plan_says_what_a_run_sends_and_holds = None  # a plan's processes have a device each
    test_random_numbers_are_left_alone = None  # parts draw one after the other, not as the whole batch does

    def choose(self, **arguments):
        return super().choose(**(arguments | {"devices": 3}))


@pytest.mark.when_changed("contrib/dp/", guard="tests/conformance/test_strategies.py::TestDDP")
class TestDDP2(conformance.DDP2Conformance):
    plugin = "ddp2"
