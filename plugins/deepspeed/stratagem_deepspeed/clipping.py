"""Measure gradient norms before the engine's step, which then uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from stratagem_deepspeed.patches import replaced


def gradient_norms(engine: Any) -> list[torch.Tensor]:
    """Return the norms over all ranks, times the loss scale: one for each flat tensor that is stepped."""
    zero = engine.optimizer
    if hasattr(zero, "_get_norm_groups"):
        groups: list[torch.Tensor] = zero._get_norm_groups()
        return groups
    if hasattr(zero, "scaled_global_norm"):
        return [zero.scaled_global_norm()]
    return [torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])]


def combined_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm over all tensors; DeepSpeed returns -1 for a norm that is not finite."""
    device = next((norm.device for norm in norms if isinstance(norm, torch.Tensor)), None)
    each = torch.stack([torch.as_tensor(norm, dtype=torch.float32, device=device) for norm in norms]).cpu()
    return torch.linalg.vector_norm(each) if bool((each >= 0).all()) else torch.tensor(torch.inf)


@contextlib.contextmanager
def without_averaging(engine: Any, norms: list[torch.Tensor]) -> Iterator[None]:
    """Within: the engine's step neither averages gradients nor measures their norms again."""
    zero = engine.optimizer
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(engine, "enable_backward_allreduce", False))
        if engine.zero_optimization_partition_gradients():
            stack.enter_context(replaced(zero, "finalize_gradient_accumulation_boundary", lambda: None))
        if hasattr(zero, "_get_norm_groups"):
            stack.enter_context(replaced(zero, "_get_norm_groups", lambda: norms))
        elif hasattr(zero, "scaled_global_norm"):
            stack.enter_context(replaced(zero, "scaled_global_norm", lambda: norms[0]))
        yield
