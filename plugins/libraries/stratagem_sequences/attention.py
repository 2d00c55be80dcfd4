"""Attention of packed rows that stays within documents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stratagem_sequences.packing import cu_seqlens

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def document_attention(document_ids: Tensor, *, is_causal: bool = True) -> Callable[..., Tensor]:
    """Return a function that computes attention within documents; make it once a batch, and call it in each layer.

    It is called as ``attend(query, key, value, scale=None, enable_gqa=False)`` with tensors (rows, heads, width, size),
    and returns what ``scaled_dot_product_attention`` returns. A CPU computes each document alone; on CUDA a compiled
    FlexAttention skips the blocks between documents. A mask serves other devices, a model that is compiled on a CPU,
    and a strategy that replaces ``scaled_dot_product_attention``: `parallel` with `context`, which takes the mask of
    whole sequences, and refuses that of a part.

    Args:
        document_ids: (rows, width), such as `PackingCollator` returns.
        is_causal: each token attends to those before it alone.
    """
    is_torchs = isinstance(F.scaled_dot_product_attention, BuiltinFunctionType)
    if is_torchs and document_ids.is_cuda:
        return functools.partial(_flex_attention(), block_mask=block_mask(document_ids, is_causal=is_causal))
    if is_torchs and document_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths = cu_seqlens(document_ids).diff().tolist()
        return functools.partial(_one_by_one, lengths, is_causal)
    return functools.partial(F.scaled_dot_product_attention, attn_mask=document_mask(document_ids, is_causal=is_causal))


def document_mask(document_ids: Tensor, *, is_causal: bool = True) -> Tensor:
    """Return which token attends to which: a boolean mask (rows, 1, width, width) for attention of torch."""
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return mask.tril() if is_causal else mask


def block_mask(document_ids: Tensor, *, is_causal: bool = True) -> BlockMask:
    """Return the same as a mask of FlexAttention, which has no backward on a CPU (torch 2.13)."""
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[row, query] == document_ids[row, key]
        return same & (query >= key) if is_causal else same

    rows, width = document_ids.shape
    return create_block_mask(attends, rows, None, width, width, device=document_ids.device)


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Any] = flex_attention
    return attend if torch.compiler.is_compiling() else _compiled(attend)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)  # as it is, it computes and keeps all pairs


def _one_by_one(
    lengths: list[int], is_causal: bool, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    def documents(tensor: Tensor) -> list[Tensor]:  # (rows, heads, width, size) -> (1, heads, length, size) for each
        parts = tensor.transpose(1, 2).flatten(0, 1).split(lengths)
        return [part.transpose(0, 1)[None] for part in parts]

    out = [
        F.scaled_dot_product_attention(*each, is_causal=is_causal, **options)[0].transpose(0, 1)
        for each in zip(documents(query), documents(key), documents(value), strict=True)
    ]
    rows: Tensor = torch.cat(out).unflatten(0, (query.shape[0], -1))
    return rows.transpose(1, 2)
