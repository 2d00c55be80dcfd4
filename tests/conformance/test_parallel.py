"""The strategy `parallel` and its presets under the kit: each axis with two processes, the rest in `make test-all`."""

from __future__ import annotations

import pytest
from torch import nn

from stratagem_parallel.conformance import ExpertsConformance
from stratagem_testing import StrategyConformance


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestReplicate(StrategyConformance):
    plugin = "parallel"


@pytest.mark.when_changed(
    "plugins/parallel/", "plugins/parallel_unchanged/", guard="tests/conformance/test_strategies.py::TestFSDPInUnits"
)
class TestTensor(StrategyConformance):
    plugin = "tensor_parallel"


@pytest.mark.when_changed(
    "plugins/parallel/", "plugins/parallel_unchanged/", guard="tests/conformance/test_strategies.py::TestFSDPInUnits"
)
class TestPipeline(StrategyConformance):
    plugin = "pipeline_parallel"
    world_sizes = (2,)


@pytest.mark.when_changed(
    "plugins/parallel/", "plugins/parallel_unchanged/", guard="tests/conformance/test_strategies.py::TestFSDPInUnits"
)
class TestContext(StrategyConformance):
    plugin = "context_parallel"
    world_sizes = (2,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestSequential(StrategyConformance):
    plugin = "ddp_sequential"
    world_sizes = (1, 2)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestSequentialReplicated(StrategyConformance):
    plugin = "ddp_sequential"
    world_sizes = (4,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestTensorAndReplicas(StrategyConformance):
    plugin = {"name": "parallel", "tensor": 2}  # noqa: RUF012
    world_sizes = (4,)


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestFSDPInUnits")
class TestTensorAndShards(StrategyConformance):
    plugin = {"name": "parallel", "tensor": 2, "shard": 2, "auto_wrap_policy": {nn.Linear}}  # noqa: RUF012
    world_sizes = (4,)


@pytest.mark.every_push(
    "test_sizes_that_it_cannot_arrange_are_refused", guard="tests/conformance/test_strategies.py::TestFSDPInUnits"
)
class TestShards(StrategyConformance):
    """Two shards, which three processes cannot hold."""

    plugin = {"name": "parallel", "shard": 2}  # noqa: RUF012
    world_sizes = (2, 3)


@pytest.mark.when_changed(
    "plugins/parallel/", "plugins/parallel_unchanged/", guard="tests/conformance/test_strategies.py::TestFSDPInUnits"
)
class TestExperts(ExpertsConformance):
    plugin = "expert_parallel"
