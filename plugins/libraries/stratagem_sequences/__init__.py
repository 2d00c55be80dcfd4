"""Sequences of different lengths: packed into rows without padding, or in batches of similar length."""

from stratagem_sequences.attention import block_mask, document_attention, document_mask
from stratagem_sequences.grouping import LengthGroupedSampler
from stratagem_sequences.packing import PackingCollator, best_fit, cu_seqlens

__all__ = [
    "LengthGroupedSampler", "PackingCollator", "best_fit", "block_mask", "cu_seqlens", "document_attention",
    "document_mask",
]  # fmt: skip
