"""The state of a run as the bytes that a peer sends to one that joins."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stratagem.api import RunContext


def written(run: RunContext) -> torch.Tensor:
    """Return the model, the optimizer and the schedulers of `run` as bytes."""
    assert run.module is not None
    state = {
        "model": run.module.state_dict(),
        "optimizer": run.optimizers[0].state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
    }
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def read(sent: torch.Tensor) -> Any:
    """Return what `written` was given. What others send is not trusted: tensors, numbers and text only."""
    return torch.load(io.BytesIO(sent.numpy().tobytes()), map_location="cpu", weights_only=True)
