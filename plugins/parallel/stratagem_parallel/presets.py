"""Presets: names for the strategy with preset options."""

from __future__ import annotations

from stratagem_parallel.strategy import ParallelStrategy


def tensor_parallel() -> ParallelStrategy:
    """Return ``tensor_parallel``: layers are cut over all processes of a node, by a plan that is derived."""
    return ParallelStrategy(tensor="auto")


def pipeline_parallel() -> ParallelStrategy:
    """Return ``pipeline_parallel``: every process holds a part of the layers."""
    return ParallelStrategy(pipeline="auto")


def context_parallel() -> ParallelStrategy:
    """Return ``context_parallel``: every process computes a part of each sequence."""
    return ParallelStrategy(context="auto")


def expert_parallel() -> ParallelStrategy:
    """Return ``expert_parallel``: every process holds a part of the experts, and reads its own samples."""
    return ParallelStrategy(expert="auto")


def ddp_sequential() -> ParallelStrategy:
    """Return ``ddp_sequential``: a pipeline over two processes, replicated over the others."""
    return ParallelStrategy(pipeline=2, schedule="gpipe", checkpoint="except_last")
