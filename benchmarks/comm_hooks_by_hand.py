"""int8, topk and one_bit compression as plain DDP hooks: what `comm_hooks.py` compares stratagem's with.

The arithmetic is that of stratagem's hooks, with error feedback by bucket, and without the check for finite gradients,
checkpoints of the residuals, stacks of hooks, loss scaling and changed buckets.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _done(tensor: torch.Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(tensor)
    return future


class TopK:
    """Send the largest gradients and their indices to all ranks."""

    def __init__(self, ratio: float) -> None:
        self.ratio, self.residuals = ratio, {}
        self.__name__ = self.__qualname__ = "topk"  # DDP logs the name of a hook

    def __call__(self, state, bucket):
        buffer, ranks = bucket.buffer(), dist.get_world_size()
        residual = self.residuals.get(bucket.index())
        values = buffer.clone() if residual is None or residual.numel() != buffer.numel() else buffer + residual
        indices = values.abs().topk(math.ceil(self.ratio * values.numel()), sorted=False).indices
        sent = values[indices]
        values[indices] = 0.0
        self.residuals[bucket.index()] = values
        all_values, all_indices = sent.new_empty(ranks * len(sent)), indices.new_empty(ranks * len(indices))
        messages = [_all_gather(all_values, sent, async_op=True).get_future()]
        messages.append(_all_gather(all_indices, indices, async_op=True).get_future())

        def sum_up(_):
            return buffer.zero_().index_add_(0, all_indices, all_values).div_(ranks)

        return torch.futures.collect_all(messages).then(sum_up)


class _Compressed:
    """All-to-all of encoded chunks, then an all-gather of their encoded averages."""

    multiple = 1

    def __init__(self) -> None:
        self.residuals, self.chunk_residuals = {}, {}
        self.__name__ = self.__qualname__ = type(self).__name__.lower()

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and the codes of each row."""
        raise NotImplementedError

    def decode(self, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, state, bucket):
        buffer, ranks, index = bucket.buffer(), dist.get_world_size(), bucket.index()
        residual = self.residuals.get(index)
        values = buffer + residual if residual is not None and residual.numel() == buffer.numel() else buffer
        length = math.ceil(buffer.numel() / (ranks * self.multiple)) * self.multiple
        rows = F.pad(values, (0, ranks * length - buffer.numel())).view(ranks, length)
        encoded = self.encode(rows)
        self.residuals[index] = (rows - self.decode(*encoded)).view(-1)[: buffer.numel()]
        received = [torch.empty_like(part) for part in encoded]
        for target, part in zip(received, encoded, strict=True):
            dist.all_to_all_single(target, part)

        mine = self.decode(*received).mean(0, keepdim=True)
        if index in self.chunk_residuals and self.chunk_residuals[index].shape == mine.shape:
            mine += self.chunk_residuals[index]
        encoded = self.encode(mine)
        self.chunk_residuals[index] = mine - self.decode(*encoded)
        for target, part in zip(received, encoded, strict=True):
            _all_gather(target, part)
        buffer.copy_(self.decode(*received).view(-1)[: buffer.numel()])
        return _done(buffer)


class Int8(_Compressed):
    """One scale for each chunk, one byte for each gradient."""

    def encode(self, rows):
        scales = rows.abs().amax(1, keepdim=True) / 127
        return scales, (rows / scales.clamp(min=1e-30)).round_().to(torch.int8)

    def decode(self, scales, codes):
        return codes * scales


class OneBit(_Compressed):
    """One mean for each block, one bit for each gradient."""

    def __init__(self, start_iter: int, block_size: int = 1024) -> None:
        super().__init__()
        self.start_iter, self.block_size, self.steps = start_iter, block_size, 0
        self.multiple = block_size

    def __call__(self, state, bucket):
        compresses = self.steps >= self.start_iter
        self.steps += bucket.is_last()
        if compresses:
            return super().__call__(state, bucket)
        message = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return message.get_future().then(lambda future: future.value()[0])

    def encode(self, rows):
        means = rows.view(len(rows), -1, self.block_size).abs().mean(-1)
        bits = (rows >= 0).view(len(rows), -1, 8)
        return means, (bits * (1 << torch.arange(8, dtype=torch.uint8))).sum(-1, dtype=torch.uint8)

    def decode(self, means, codes):
        bits = (codes[..., None] & (1 << torch.arange(8, dtype=torch.uint8))).bool()
        means = means[..., None].expand(*means.shape, self.block_size).reshape(*bits.shape)
        return torch.where(bits, means, -means).flatten(1)
