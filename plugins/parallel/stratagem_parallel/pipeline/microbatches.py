"""Divide a batch into micro-batches, and merge what they return."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import ConfigError


def split(batch: Any, count: int) -> list[Any]:
    """Return `batch` as `count` micro-batches of equal sizes, divided along dimension 0.

    Raises:
        ConfigError: the number of samples is not a multiple of `count`, or it is not clear what a sample is.
    """
    size = batch_size(batch)
    if size % count:
        raise ConfigError(
            f"a batch of {size} samples is divided into {count} micro-batches", expected=f"a multiple of {count}",
            do="change the batch size or strategy.parallel.microbatches, or set drop_last=True in the loader",
        )  # fmt: skip
    step = size // count
    return [_part(batch, size, slice(start, start + step)) for start in range(0, size, step)]


def batch_size(batch: Any) -> int:
    """Return the number of samples in `batch`.

    Raises:
        ConfigError: it has no tensor with a dimension, or they differ in dimension 0.
    """
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()))
    if not sizes:
        raise ConfigError(
            "a batch has no tensor that can be divided into micro-batches", expected="a tensor with a dimension"
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"a batch to be divided into micro-batches has tensors of {' and of '.join(map(str, sizes))} in "
            "dimension 0",
            expected="the same number of samples in all tensors",
            do="move tensors that are not per sample to a buffer of the module",
        )
    return sizes[0]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in the lists, tuples and dictionaries of `batch`."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, list | tuple | dict | UserDict):
        for item in batch.values() if isinstance(batch, dict | UserDict) else batch:
            yield from tensors_of(item)


def _part(batch: Any, size: int, bound: slice) -> Any:
    """Return the samples in `bound`, out of `size`, and values that are not per sample unchanged."""
    if isinstance(batch, Tensor):
        return batch[bound] if batch.dim() else batch
    if isinstance(batch, dict):
        return type(batch)({key: _part(item, size, bound) for key, item in batch.items()})
    if isinstance(batch, UserDict):
        changed = copy.copy(batch)
        changed.data = {key: _part(item, size, bound) for key, item in batch.items()}
        return changed
    if not isinstance(batch, list | tuple):
        return batch
    if hasattr(batch, "_fields"):
        return type(batch)(*(_part(item, size, bound) for item in batch))
    if len(batch) == size and next(tensors_of(batch), None) is None:
        return batch[bound]  # one value per sample, such as its name: loaders collate those into a list
    return type(batch)([_part(item, size, bound) for item in batch])


def merge(outputs: list[Any]) -> Any:
    """Return what micro-batches returned as one value: tensors joined along dimension 0, numbers averaged."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.stack(outputs).to(torch.promote_types(first.dtype, torch.float32)).mean() if (
            not first.dim()
        ) else torch.cat(outputs)  # fmt: skip
    if isinstance(first, bool | str) or first is None:
        return first if all(each == first for each in outputs) else outputs
    if isinstance(first, int | float):
        return sum(outputs) / len(outputs)
    if isinstance(first, dict):
        return type(first)({key: merge([output[key] for output in outputs]) for key in first})
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        return type(first)([merge(list(items)) for items in zip(*outputs, strict=True)])
    return outputs
