"""Attention over sequences of which each rank has a part.

[Note: two methods]
Each of the n ranks has t consecutive positions of sequences of T = n * t. With Ulysses (Jacobs et al., "DeepSpeed
Ulysses", 2023) ranks exchange positions for heads, attend over whole sequences with 1/n of the heads, and exchange
back. With an all-gather of keys and values each rank attends from its own positions to all.

[Note: balance]
With a causal mask the queries of rank n-1 have 2n-1 times as many keys as those of rank 0. So after the all-gather
rank i and its mirror, rank n-1-i, swap the second halves of their queries: rank i attends from halves 2i and 2(n-1-i)+1
of the 2n halves of a sequence, whose keys are 2n+1 halves together on each rank, and returns what is its mirror's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import handle_torch_function, has_torch_function

from stratagem.errors import ConfigError
from stratagem_parallel.exchange import exchange, gather

if TYPE_CHECKING:
    from stratagem.api import Collectives


class SequenceAttention:
    """Replaces ``scaled_dot_product_attention``, whose signature it has; see [Note: two methods]. Collective.

    Args:
        attend: torch's function.
        method: "ulysses", "all_gather", or "auto" for the first where heads divide.
    """

    def __init__(self, attend: Callable[..., Tensor], over: Collectives, method: str = "auto") -> None:
        self.attend, self.over, self.method = attend, over, method
        self.__name__ = getattr(attend, "__name__", "scaled_dot_product_attention")
        #: Whether a step runs; a reference that is kept and called at another time computes as torch does.
        self.is_active: Callable[[], bool] = lambda: True
        #: Calls so far.
        self.calls = 0
        #: True within a call.
        self.is_inside = False
        self._is_local = 0
        #: Takes its lengths in each call: torch makes none under a dispatch mode, and allocates two numbers a pair.
        self._bias = causal_lower_right(1, 1)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Within: attention is computed on each rank's tensors alone."""
        self._is_local += 1
        try:
            yield
        finally:
            self._is_local -= 1

    @torch._disable_dynamo  # a compiled model calls it as it is
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if has_torch_function((query, key, value)):  # activations that `tensor` cuts: it calls this for their parts
            result: Tensor = handle_torch_function(
                self, (query, key, value), query, key, value, attn_mask=attn_mask, dropout_p=dropout_p,
                is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
            return result
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not self.is_active():
            return self.attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)
        self.calls += 1
        self.is_inside = True
        try:
            if self._is_local or (is_causal and attn_mask is not None):  # torch refuses both
                return self.attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)
            _check_lengths(query, key)
            if self._by_heads(query, key, attn_mask):
                return self._ulysses(query, key, value, attn_mask, is_causal, options)
            return self._gathered(query, key, value, attn_mask, is_causal, options)
        finally:
            self.is_inside = False

    def _by_heads(self, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
        """Return whether to use Ulysses.

        Raises:
            ConfigError: it was asked for, and the heads do not divide.
        """
        if self.method == "all_gather":
            return False
        size = self.over.world_size
        heads = [tensor.shape[-3] if tensor.dim() > 3 else 1 for tensor in (query, key)]
        divides = all(number % size == 0 for number in heads)
        if not divides and self.method == "ulysses":
            raise ConfigError(
                f"strategy.parallel.context_method is 'ulysses' with context {size}, and an attention has {heads[0]} "
                f"heads for queries and {heads[1]} for keys",
                expected=f"multiples of {size}", do="choose 'all_gather' or 'auto'",
            )  # fmt: skip
        rows_are_cut = mask is not None and mask.dim() > 1 and mask.shape[-2] == query.shape[-2] > 1
        return divides and (self.method == "ulysses" or not rows_are_cut)

    # --- Ulysses -------------------------------------------------------------------------------------------------

    def _ulysses(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        if mask is not None:
            mask = self._whole_keys(mask, query)
            mask = self._heads_of(self._gather_mask(mask, -2) if mask.shape[-2] == query.shape[-2] else mask, query)
        if query.shape[-1] == value.shape[-1] and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
            sizes = [tensor.shape[-3] // self.over.world_size for tensor in (query, key, value)]
            query, key, value = self._to_heads(query, key, value).split(sizes, -3)
        else:
            query, key, value = (self._to_heads(tensor) for tensor in (query, key, value))
        out = self.attend(query, key, value, attn_mask=mask, is_causal=is_causal, **options)
        return self._to_positions(out)

    def _to_heads(self, *tensors: Tensor) -> Tensor:
        """Return 1/n of the heads of each tensor, for all positions: (..., h, t, d) -> (..., sum of h/n, T, d)."""
        size = self.over.world_size
        parts = torch.cat([tensor.unflatten(-3, (size, -1)) for tensor in tensors], -3)  # (..., n, sum of h/n, t, d)
        received = exchange(parts.movedim(-4, 0), self.over)  # first dimension: the rank whose positions these are
        return received.movedim(0, -3).flatten(-3, -2)

    def _to_positions(self, out: Tensor) -> Tensor:
        """Return all heads for this rank's positions: (..., h/n, T, d) -> (..., h, t, d)."""
        parts = out.unflatten(-2, (self.over.world_size, -1))  # (..., h/n, n, t, d)
        received = exchange(parts.movedim(-3, 0), self.over)  # first dimension: the rank whose heads these are
        return received.movedim(0, -4).flatten(-4, -3)

    # --- All-gather of keys and values ---------------------------------------------------------------------------

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        if key.shape == value.shape:
            key, value = gather(torch.stack([key, value]), -2, self.over).unbind()
        else:
            key, value = gather(key, -2, self.over), gather(value, -2, self.over)
        if is_causal:
            return self._balanced(query, key, value, options)
        part = query.shape[-2]
        if mask is not None:
            mask = self._whole_keys(mask, query)
            if mask.shape[-2] == part * self.over.world_size:
                mask = mask.narrow(-2, self.over.rank * part, part)
        return self.attend(query, key, value, attn_mask=mask, **options)

    def _balanced(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Attend causally to the gathered keys; see [Note: balance]."""
        device = query.device.type
        if torch.is_autocast_enabled(device):  # torch's function casts, but not before it looks for a kernel for a bias
            query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
        rank, size, part = self.over.rank, self.over.world_size, query.shape[-2]
        if part == 1:
            return self._up_to(rank + 1, query, key, value, options)
        first, second = query.tensor_split(2, -2)
        first = self._up_to(rank * part + first.shape[-2], first, key, value, options)
        second = self._up_to((size - rank) * part, self._swap(second), key, value, options)
        return torch.cat([first, self._swap(second)], -2)

    def _swap(self, tensor: Tensor) -> Tensor:
        """Return the `tensor` of this rank's mirror, of the same shape."""
        rows = [0] * self.over.world_size
        rows[-1 - self.over.rank] = len(tensor)
        return exchange(tensor, self.over, rows, rows)

    def _up_to(self, end: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Attend causally from the positions before `end`, the last of which are those of `query`."""
        key, value = key[..., :end, :], value[..., :end, :]
        mask = self._causal_mask(query.shape[-2], end, query.device)
        with _under_its_name(self.attend):
            return self.attend(query, key, value, attn_mask=mask, **options)

    def _causal_mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the causal mask for the last of `keys` positions: a bias, for which GPUs have fused kernels."""
        if not isinstance(self.attend, BuiltinFunctionType):  # a user's function in place of torch's
            return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        self._bias.seq_len_q, self._bias.seq_len_kv = queries, keys
        return self._bias

    # --- Masks ---------------------------------------------------------------------------------------------------

    def _whole_keys(self, mask: Tensor, query: Tensor) -> Tensor:
        """Return `mask` for all keys, after checking its shape; that of keys alone may be cut as they are.

        Raises:
            ConfigError: it is a mask between positions of a part.
        """
        part = query.shape[-2]
        whole = part * self.over.world_size
        rows, keys = mask.shape[-2:] if mask.dim() > 1 else (0, 0)
        if rows == 1 and keys == part:
            return self._gather_mask(mask, -1)
        if rows not in (1, part, whole) or keys not in (1, whole):
            raise ConfigError(
                f"scaled_dot_product_attention got an attn_mask of shape {tuple(mask.shape)}, and this rank has "
                f"{part} of the {whole} positions of each sequence",
                expected=f"one for all {whole} keys, for the queries of this rank or for all of them",
                do="pass is_causal=True, or build the mask for whole sequences (stratagem_parallel.context_offset)",
            )
        return mask

    def _heads_of(self, mask: Tensor, query: Tensor) -> Tensor:
        """Return the part of `mask` for the heads that Ulysses gives to this rank."""
        if mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        heads = query.shape[-3] // self.over.world_size
        return mask.narrow(-3, self.over.rank * heads, heads)

    def _gather_mask(self, mask: Tensor, dim: int) -> Tensor:
        if mask.dtype is torch.bool:
            return gather(mask.to(torch.uint8), dim, self.over).bool()
        return gather(mask, dim, self.over)


@contextlib.contextmanager
def _under_its_name(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Within: torch has `attend` under its own name, by which a causal bias recognizes and calls it."""
    replacement = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = replacement


def _check_lengths(query: Tensor, key: Tensor) -> None:
    """Refuse queries and keys of different lengths: which of them are cut cannot be told.

    Raises:
        ConfigError: they differ.
    """
    if query.shape[-2] != key.shape[-2]:
        raise ConfigError(
            f"scaled_dot_product_attention got {query.shape[-2]} queries and {key.shape[-2]} keys, with "
            "strategy.parallel.context above 1",
            expected="as many of both: equal parts of sequences",
            do="call it within stratagem_parallel.local_attention() if all ranks have all of these keys",
        )
