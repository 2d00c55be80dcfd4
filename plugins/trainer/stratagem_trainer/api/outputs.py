"""What `training_step` returned."""

from __future__ import annotations

from typing import Any

import torch


def mean_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss in `outputs` of ``training_step``, detached: a number, a sum divided by its ``"count"``.

    None if there is none, or more than one number.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    return loss.detach() / outputs["count"] if isinstance(outputs, dict) and "count" in outputs else loss.detach()
