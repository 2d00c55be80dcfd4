"""What the conformance kit needs to know of these callbacks: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from stratagem_testing import CallbackConformance


class ActivationCheckpointingConformance(CallbackConformance):
    """Computes the layers of the kit's modules again."""

    plugin: ClassVar = {"name": "activation_checkpointing", "policy": {nn.Linear}}


class CompileConformance(CallbackConformance):
    """Compiling takes a while."""

    limit_s = 600


class SyncBatchNormConformance(CallbackConformance):
    """A model with batch normalization; statistics of the whole batch are those of one process."""

    world_sizes = (2,)

    def prepare(self, module: Any) -> Any:
        module.net[1] = nn.BatchNorm1d(module.net[0].out_features)
        return module
