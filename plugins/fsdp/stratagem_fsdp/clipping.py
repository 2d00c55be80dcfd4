"""Clip gradients of which some are sharded and others are not."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from stratagem_sharding.shards import local


def clip_norm(gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale `gradients` so that their norm is at most `max_norm`; return the norm before. Collective."""
    # Shards have to be summed over the ranks, whole gradients must not be.
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = [torch.nn.utils.get_total_norm(some) for some in (sharded, whole) if some]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    shards = [local(gradient) for gradient in gradients]
    for device, dtype in {(shard.device, shard.dtype) for shard in shards}:
        same = [shard for shard in shards if (shard.device, shard.dtype) == (device, dtype)]
        torch._foreach_mul_(same, factor.to(device, dtype))
    return total
