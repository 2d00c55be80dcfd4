"""Split a batch into one chunk for each device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen
from torch import Tensor

from stratagem.errors import ConfigError


@frozen
class Chunk:
    """The arguments of a step for one replica."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    #: Number of samples.
    size: int


def scatter(inputs: tuple[tuple[Any, ...], dict[str, Any]], count: int) -> list[Chunk]:
    """Split the arguments of a step into at most `count` chunks along dimension 0, of the sizes of `torch.chunk`."""
    if count == 1:
        return [Chunk(inputs[0], inputs[1], size=1)]
    size = _batch_size(inputs, count)
    step = max(1, -(-size // count))
    bounds = [slice(start, min(start + step, size)) for start in range(0, max(1, size), step)]
    chunks = [_chunk_of(inputs, size, bound) for bound in bounds]
    return [
        Chunk(arguments, options, bound.stop - bound.start)
        for (arguments, options), bound in zip(chunks, bounds, strict=True)
    ]


def _batch_size(batch: Any, count: int) -> int:
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()))
    if not sizes:
        raise ConfigError(
            f"a batch has no tensor that can be split for {count} devices",
            expected="a tensor with at least one dimension",
            do="set devices to 1, or choose a strategy with a process for each device",
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"a batch to be split for {count} devices has tensors of {' and of '.join(map(str, sizes))} in dimension 0",
            expected="the same number of samples in all tensors",
            do="move tensors that are not per sample to a buffer of the module",
        )
    return sizes[0]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, list | tuple | dict):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(item)


def _chunk_of(batch: Any, size: int, bound: slice) -> Any:
    """Return the samples in `bound`, out of `size`, and values that are not per sample unchanged."""
    if isinstance(batch, Tensor):
        return batch[bound] if batch.dim() else batch
    if isinstance(batch, dict):
        return type(batch)({key: _chunk_of(item, size, bound) for key, item in batch.items()})
    if not isinstance(batch, list | tuple):
        return batch
    if hasattr(batch, "_fields"):
        return type(batch)(*(_chunk_of(item, size, bound) for item in batch))
    if len(batch) == size and next(_tensors(batch), None) is None:
        return batch[bound]  # one value per sample, such as its name: loaders collate those into a list
    return type(batch)([_chunk_of(item, size, bound) for item in batch])
