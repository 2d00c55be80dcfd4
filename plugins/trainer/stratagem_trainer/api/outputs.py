"""What `training_step` returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mean_loss(outputs: Any, by_count: bool = True) -> torch.Tensor | None:
    """Return the loss in `outputs` of ``training_step``, detached; None if there is none, or more than one number.

    With `by_count` it is divided by its ``"count"``, if it has one; a sum over no targets is 0.
    """
    import torch

    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    count = outputs.get("count") if by_count and isinstance(outputs, dict) else None
    return loss.detach() if count is None else loss.detach().div(count + (count == 0))
