"""A module that runs each step on several devices, with a replica of the user's module on each.

[Note: replicas]
A batch is scattered into *chunks*, one for each device, and a *replica* of the user's module runs the step on each, in
its own thread. Replicas share the parameters (on the CPU) or are copied from them through autograd (on other devices),
so one backward reaches the parameters from all replicas. A replica exists for one step. Their outputs are gathered on
the first device; the module's ``_end`` methods run only there, on the module itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.api.batches import move_batch
from stratagem.errors import ConfigError
from stratagem_dp.gather import gather, mean
from stratagem_dp.parallel_apply import parallel_apply
from stratagem_dp.replica_logs import ReplicaLog, publish
from stratagem_dp.replicas import AttributeCheck, replicate
from stratagem_dp.scatter import Chunk, scatter

if TYPE_CHECKING:
    from stratagem.api import RunContext


def data_parallel(module: nn.Module, run: RunContext) -> DataParallelSteps:
    """Move `module`, a `StepModule`, to the first device, and return the module that runs its steps on all devices."""
    if len(run.devices) > 1:
        _check_replicable(module, run)
    return DataParallelSteps(module.to(run.device), run.devices)


def _check_replicable(module: Any, run: RunContext) -> None:
    """Refuse modules whose replicas would run the original module: compiled, or with activation checkpointing."""
    compiled = [
        each
        for each in module.modules()
        if (each is module.module and module.compiles_steps)
        or hasattr(each, "_orig_mod")
        or each._compiled_call_impl is not None
    ]
    if compiled:
        raise ConfigError(
            f"{type(compiled[0]).__name__} is compiled, and {len(run.devices)} devices of one process run copies of it",
            expected="a module that is not compiled",
            do="drop torch.compile, or choose a strategy with a process for each device",
        )
    if run.settings.activation_checkpointing is not None and run.stage == "train":
        raise ConfigError(
            f"activation_checkpointing is set, and {len(run.devices)} devices of one process run copies of the module",
            expected="no activation_checkpointing",
            do="use torch.utils.checkpoint in the module, or choose a strategy with a process for each device",
        )


class DataParallelSteps(nn.Module):
    """Runs each step on chunks of the batch, one on each device; see [Note: replicas]."""

    def __init__(self, steps: Any, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.steps, self.devices = steps, devices

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        chunks = scatter((arguments, options), len(self.devices))
        outputs = [self.steps.step(method, *arguments, **options)] if len(chunks) == 1 else self._run(method, chunks)
        if self.steps.has_end(method):
            return self.steps.end(method, gather(outputs, self.devices[0], torch.stack))
        if len(chunks) == 1:
            return outputs[0]
        return gather(outputs, self.devices[0], functools.partial(mean, sizes=[chunk.size for chunk in chunks]))

    def _run(self, method: str, chunks: list[Chunk]) -> list[Any]:
        replicas = replicate(self.steps, self.devices[: len(chunks)])
        logs = [ReplicaLog(chunk.size) for chunk in chunks]
        for replica, log in zip(replicas, logs, strict=True):
            if callable(getattr(type(replica.module), "log", None)):
                replica.module.__dict__["log"] = log
        check = AttributeCheck(replicas[0], method)
        outputs = parallel_apply(
            [functools.partial(_step, *each, method) for each in zip(replicas, chunks, self.devices, strict=False)],
            self.devices,
        )
        check.raise_if_changed()
        publish(self.steps.module, logs, self.devices[0])
        return outputs


def _step(replica: Any, chunk: Chunk, device: torch.device, method: str) -> Any:
    arguments, options = move_batch((chunk.arguments, chunk.options), device)
    return replica.step(method, *arguments, **options)
