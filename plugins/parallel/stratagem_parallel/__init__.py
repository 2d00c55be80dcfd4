"""Strategies that cut the model: tensor, sequence, context, pipeline and expert parallelism over one mesh."""

from stratagem_parallel.context.axis import context_mean, context_offset, context_sum, local_attention
from stratagem_parallel.presets import (
    context_parallel,
    ddp_sequential,
    expert_parallel,
    pipeline_parallel,
    tensor_parallel,
)
from stratagem_parallel.strategy import ParallelStrategy

__all__ = [
    "ParallelStrategy", "context_mean", "context_offset", "context_parallel", "context_sum", "ddp_sequential",
    "expert_parallel", "local_attention", "pipeline_parallel", "tensor_parallel",
]  # fmt: skip
