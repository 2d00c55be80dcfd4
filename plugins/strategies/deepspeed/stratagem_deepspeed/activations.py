"""Layers that a model calls through ``deepspeed.checkpointing.checkpoint``: how their inputs are kept until backward.

deepspeed keeps the way in variables of a module, which neither its engine nor a configuration file sets.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError

#: The variables by which deepspeed remembers how layers are checkpointed.
_VARIABLES = (
    "PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING", "SYNCHRONIZE", "PROFILE_TIME", "num_layers",
    "mpu", "mp_rank", "mp_size", "mp_group", "timers", "deepspeed_checkpointing_enabled", "_cpu_offload_engine",
    "_checkpoint_grad_enabled", "non_reentrant_checkpoint",
)  # fmt: skip
#: What ``deepspeed.checkpointing.configure`` calls the keys of the configuration.
_ARGUMENTS = {
    "partition_activations": "partition_activations",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


class CheckpointedLayers:
    """How a run checkpoints layers; `forget` makes it what it was before the run."""

    def __init__(self) -> None:
        self._before = {name: getattr(_module(), name) for name in _VARIABLES}
        self._wanted: list[str] = []
        self._is_checked = False

    def configure(self, section: Mapping[str, Any], stage: int, model: nn.Module) -> None:
        """Have layers of `model` checkpointed as `section` says; if it says nothing, as the model has arranged it."""
        self._wanted = [name for name in _ARGUMENTS if section.get(name) and name != "number_checkpoints"]
        module = _module()
        if self._wanted:
            given = {argument: section.get(name) for name, argument in _ARGUMENTS.items()}
            module.configure(None, **given)
            module._checkpoint_grad_enabled = None  # until a layer is checkpointed
            model.register_forward_pre_hook(_forget_the_last_forward)
        if stage == 3:
            module.non_reentrant_checkpoint = _refuse

    def check_used(self, speaks: bool) -> None:
        """Tell the user, after a step, of options from which nothing came. Does nothing the next time."""
        was_checked, self._is_checked = self._is_checked, True
        if self._wanted and not was_checked and speaks and _module()._checkpoint_grad_enabled is None:
            warnings.warn(
                f"{' and '.join(self._wanted)} had no effect on the first step: they concern layers that the model "
                "calls through deepspeed.checkpointing.checkpoint, and it called none",
                stacklevel=2,
            )

    def forget(self) -> None:
        """Undo `configure`, and what the model has arranged. Safe to call twice."""
        module = _module()
        module.reset()
        for name, value in self._before.items():
            setattr(module, name, value)


def _module() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing


def _forget_the_last_forward(*_: Any) -> None:
    """Begin with empty buffers: those of an evaluation were followed by no backward, which would have emptied them."""
    module = _module()
    if module.CONTIGUOUS_CHECKPOINTING or not torch.is_grad_enabled():
        module.reset()


def _refuse(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "the model calls deepspeed.checkpointing.non_reentrant_checkpoint, which at stage 3 computes with parameters "
        "that are not there",
        expected="deepspeed.checkpointing.checkpoint, or torch.utils.checkpoint.checkpoint",
    )
