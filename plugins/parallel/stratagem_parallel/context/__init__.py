"""Context parallelism: each rank computes a part of every sequence."""

from stratagem_parallel.context.axis import ContextAxis, context_mean, context_offset, context_sum, local_attention

__all__ = ["ContextAxis", "context_mean", "context_offset", "context_sum", "local_attention"]
