"""What the conformance kit needs to know of these callbacks: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from stratagem_callbacks.optimizer_offload import OptimizerOffload, StateMover
from stratagem_testing import CallbackConformance


class EarlyStoppingConformance(CallbackConformance):
    """The metric is in none of the kit's modules."""

    plugin: ClassVar = {"name": "early_stopping", "monitor": "val_loss", "strict": False}


class GradientAccumulationSchedulerConformance(CallbackConformance):
    """It changes nothing, so that the weights can be compared."""

    plugin: ClassVar = {"name": "gradient_accumulation_scheduler", "scheduling": {0: 1}}


class GlobalBatchSizeConformance(CallbackConformance):
    """As many samples as the kit's batches have."""

    plugin: ClassVar = {"name": "global_batch_size", "samples": 24}


class LambdaConformance(CallbackConformance):
    """It calls nothing."""

    plugin: ClassVar = {"name": "lambda", "on": {}}


class EMAConformance(CallbackConformance):
    """It leaves the weights as they were trained."""

    plugin: ClassVar = {"name": "ema", "keep": False}


class StochasticWeightAveragingConformance(CallbackConformance):
    """Changes the learning rate and the weights."""

    plugin: ClassVar = {"name": "stochastic_weight_averaging", "swa_lrs": 1e-3}
    changes_training = True


class PredictionWriterConformance(CallbackConformance):
    """Each check works in a folder that is empty."""

    plugin: ClassVar = {"name": "prediction_writer", "dirpath": "predictions"}


class PyTorchProfilerConformance(CallbackConformance):
    """The kit trains two batches and more."""

    plugin: ClassVar = {"name": "pytorch_profiler", "wait": 0, "warmup": 1, "active": 1}


class BackboneFinetuningConformance(CallbackConformance):
    """Freezes the first layer of the kit's network, in one process."""

    plugin: ClassVar = {"name": "backbone_finetuning"}
    world_sizes = (1,)
    changes_training = True

    def prepare(self, module: Any) -> Any:
        module.backbone = module.net[0]
        return module


class OnSeveralRanks(CallbackConformance):
    """It is refused in one process."""

    world_sizes = (2,)


class WithLogger(CallbackConformance):
    """It writes to loggers."""

    arguments: ClassVar = {"logger": "csv"}


class TakesTime(CallbackConformance):
    """Its state has time, which goes on."""

    test_its_state_can_be_saved: Any = None


class BatchSizeFinderConformance(CallbackConformance):
    """Changes the batches, in one process."""

    world_sizes = (1,)
    changes_training = True


class OptimizerInBackwardConformance(CallbackConformance):
    """In one process: the kit's ranks average gradients in buckets."""

    plugin: ClassVar = "optimizer_in_backward"
    world_sizes = (1,)


class _WithinTheHost(OptimizerOffload):
    """Moves state to another place of the host's memory, on a CPU."""

    def _mover_for(self, run: Any) -> StateMover:
        return StateMover(torch.device("cpu"))


class OptimizerOffloadConformance(CallbackConformance):
    """The kit trains on a CPU."""

    plugin: ClassVar = _WithinTheHost()
