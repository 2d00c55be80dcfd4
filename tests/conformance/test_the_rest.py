"""Every first-party environment, launcher, accelerator, checkpoint format, callback and logger under the kit."""

from __future__ import annotations

import tempfile
from typing import ClassVar

import pytest

from programs import scripts
from stratagem import World
from stratagem_callbacks import conformance
from stratagem_testing import (
    AcceleratorConformance,
    CallbackConformance,
    CheckpointConformance,
    EnvironmentConformance,
    LauncherConformance,
    LoggerConformance,
)

WHERE_FORMATS_CHANGED = pytest.mark.when_changed(
    "plugins/checkpoints/", "plugins/testing/", reason="others of its kind pass the same checks"
)
WHERE_CALLBACKS_CHANGED = pytest.mark.when_changed(
    "plugins/callbacks/", "plugins/testing/", reason="others of its kind pass the same checks"
)


class TestLocal(EnvironmentConformance):
    plugin = "local"


class TestTorchElastic(EnvironmentConformance):
    plugin = "torchelastic"
    variables = {  # noqa: RUF012
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "2",
    }  # fmt: skip
    optional = ("MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")
    world = World(
        rank=1, local_rank=1, world_size=2, local_world_size=2, main_address="node0", main_port=29500, may_restart=True
    )


class TestSubprocess(LauncherConformance):
    plugin = "subprocess"
    popen = scripts.Popen


class TestSpawn(LauncherConformance):
    plugin = "spawn"
    popen = scripts.Popen


class TestFork(LauncherConformance):
    plugin = "fork"
    popen = scripts.Popen


class TestCPU(AcceleratorConformance):
    plugin = "cpu"
    tolerance = 1e-6


class TestCUDA(AcceleratorConformance):
    plugin = "cuda"


class TestMPS(AcceleratorConformance):
    plugin = "mps"


class TestXPU(AcceleratorConformance):
    plugin = "xpu"


class TestFullCheckpoint(CheckpointConformance):
    plugin = "full"


class TestShardedCheckpoint(CheckpointConformance):
    plugin = "sharded"


@pytest.mark.sweep(guard="tests/conformance/test_the_rest.py::TestFullCheckpoint")
class TestShardedCheckpointInTheBackground(CheckpointConformance):
    plugin: ClassVar = {"name": "sharded", "async_save": True}


@WHERE_FORMATS_CHANGED
class TestFullCheckpointInTheBackground(CheckpointConformance):
    plugin: ClassVar = {"name": "full", "async_save": True}


@WHERE_FORMATS_CHANGED
class TestSafetensorsCheckpoint(CheckpointConformance):
    plugin = "safetensors"


@WHERE_FORMATS_CHANGED
class TestDCPCheckpoint(CheckpointConformance):
    plugin = "dcp"


@pytest.mark.sweep(guard="tests/conformance/test_the_rest.py::TestFullCheckpoint")
class TestSafetensorsCheckpointInTheBackground(CheckpointConformance):
    plugin: ClassVar = {"name": "safetensors", "async_save": True}


@pytest.mark.sweep(guard="tests/conformance/test_the_rest.py::TestFullCheckpoint")
class TestDCPCheckpointInTheBackground(CheckpointConformance):
    plugin: ClassVar = {"name": "dcp", "async_save": True}


class TestProgress(CallbackConformance):
    plugin = "progress"


class TestModelCheckpoint(CallbackConformance):
    plugin = "model_checkpoint"


class TestEarlyStopping(conformance.EarlyStoppingConformance): ...


class TestGradientAccumulationScheduler(conformance.GradientAccumulationSchedulerConformance): ...


class TestLambda(conformance.LambdaConformance): ...


@WHERE_CALLBACKS_CHANGED
class TestTimer(conformance.TakesTime):
    plugin = "timer"


class TestGarbageCollection(CallbackConformance):
    plugin = {"name": "garbage_collection", "every_n_steps": 1}  # noqa: RUF012


class TestTQDM(CallbackConformance):
    plugin = "tqdm"


class TestModelSummary(CallbackConformance):
    plugin = "model_summary"


class TestOptimizerInBackward(conformance.OptimizerInBackwardConformance): ...


@WHERE_CALLBACKS_CHANGED
class TestOptimizerOffload(conformance.OptimizerOffloadConformance): ...


class TestHints(CallbackConformance):
    plugin = "hints"


class TestEMA(conformance.EMAConformance): ...


@WHERE_CALLBACKS_CHANGED
class TestSpikeDetection(CallbackConformance):
    plugin = "spike_detection"


class TestOnExceptionCheckpoint(CallbackConformance):
    plugin = "on_exception_checkpoint"


class TestPredictionWriter(conformance.PredictionWriterConformance): ...


class TestSimpleProfiler(CallbackConformance):
    plugin = {"name": "simple_profiler", "write": False}  # noqa: RUF012


class TestPreemption(CallbackConformance):
    plugin = "preemption"


@WHERE_CALLBACKS_CHANGED
class TestReport(conformance.TakesTime):
    plugin = {"name": "report", "path": f"{tempfile.mkdtemp()}/report.html"}  # noqa: RUF012


class TestCSV(LoggerConformance):
    plugin = "csv"
