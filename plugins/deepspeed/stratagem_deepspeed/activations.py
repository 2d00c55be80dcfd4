"""Activation checkpointing by ``deepspeed.checkpointing.checkpoint``: how the inputs of layers are kept until backward.

DeepSpeed keeps these settings in variables of a module, which neither its engine nor a configuration file sets.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError

#: The module's variables.
_VARIABLES = (
    "PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING", "SYNCHRONIZE", "PROFILE_TIME", "num_layers",
    "mpu", "mp_rank", "mp_size", "mp_group", "timers", "deepspeed_checkpointing_enabled", "_cpu_offload_engine",
    "_checkpoint_grad_enabled", "non_reentrant_checkpoint",
)  # fmt: skip
#: Arguments of ``deepspeed.checkpointing.configure`` by the keys of the configuration.
_ARGUMENTS = {
    "partition_activations": "partition_activations",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


class CheckpointedLayers:
    """The settings of activation checkpointing in a run; `reset` restores those before the run."""

    def __init__(self) -> None:
        self._before = {name: getattr(_module(), name) for name in _VARIABLES}
        self._wanted: list[str] = []
        self._is_checked = False

    def configure(self, section: Mapping[str, Any], stage: int, model: nn.Module) -> None:
        """Apply `section` to the layers of `model`; if it is empty, keep what the model has configured itself."""
        self._wanted = [name for name in _ARGUMENTS if section.get(name) and name != "number_checkpoints"]
        module = _module()
        if self._wanted:
            given = {argument: section.get(name) for name, argument in _ARGUMENTS.items()}
            module.configure(None, **given)
            module._checkpoint_grad_enabled = None  # until a layer is checkpointed
            model.register_forward_pre_hook(_clear_buffers)
        if stage == 3:
            module.non_reentrant_checkpoint = _refuse

    def check_used(self, speaks: bool) -> None:
        """After the first step, warn if no layer used the options."""
        was_checked, self._is_checked = self._is_checked, True
        if self._wanted and not was_checked and speaks and _module()._checkpoint_grad_enabled is None:
            warnings.warn(
                f"{' and '.join(self._wanted)} had no effect on the first step: they apply to layers that the model "
                "calls through deepspeed.checkpointing.checkpoint, and it called none",
                stacklevel=2,
            )

    def reset(self) -> None:
        """Undo `configure`, and what the model has configured itself. Safe to call twice."""
        module = _module()
        module.reset()
        for name, value in self._before.items():
            setattr(module, name, value)


def _module() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing


def _clear_buffers(*_: Any) -> None:
    """Clear the buffers before a forward: after an evaluation no backward has cleared them."""
    module = _module()
    if module.CONTIGUOUS_CHECKPOINTING or not torch.is_grad_enabled():
        module.reset()


def _refuse(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "the model calls deepspeed.checkpointing.non_reentrant_checkpoint, which at stage 3 computes with parameters "
        "that are not gathered",
        expected="deepspeed.checkpointing.checkpoint, or torch.utils.checkpoint.checkpoint",
    )
