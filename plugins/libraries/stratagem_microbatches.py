"""Divide a batch into micro-batches, and merge what they return and log."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import ConfigError
from stratagem_trainer.api.metric_values import combine, number

#: One value that was logged: its name, a number, and the options of `Module.log`.
Entry = tuple[str, Any, dict[str, Any]]
_CAN_MERGE = ("mean", "sum", "max", "min")


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return `batch` as micro-batches of `sizes` samples, which are views of it along dimension 0.

    Args:
        sizes: their sum is the `batch_size` of `batch`.
    """
    size = sum(sizes)
    ends = itertools.accumulate(sizes)
    return [_part(batch, size, slice(end - part, end)) for end, part in zip(ends, sizes, strict=True)]


def batch_size(batch: Any, parts: str = "micro-batches") -> int:
    """Return the number of samples in `batch`, which is to be divided into `parts`.

    Raises:
        ConfigError: it has no tensor with a dimension, or they differ in dimension 0.
    """
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()))
    if not sizes:
        raise ConfigError(
            f"a batch has no tensor that can be divided into {parts}", expected="a tensor with a dimension"
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"a batch to be divided into {parts} has tensors of {' and of '.join(map(str, sizes))} in dimension 0",
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


def merge(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return what micro-batches returned as one value: tensors joined along dimension 0, numbers averaged.

    Args:
        weights: how much each micro-batch counts in a mean, such as its number of samples.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else mean(outputs, weights)
    if isinstance(first, bool | str) or first is None:
        return first if all(each == first for each in outputs) else list(outputs)
    if isinstance(first, int | float):
        return mean(outputs, weights)
    if isinstance(first, dict):
        return type(first)({key: merge([output[key] for output in outputs], weights) for key in first})
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        return type(first)([merge(items, weights) for items in zip(*outputs, strict=True)])
    return list(outputs)


def mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of numbers, or of tensors of one number: in at least float32."""
    total = sum(weights)
    if isinstance(values[0], Tensor):
        stacked = torch.stack([torch.as_tensor(value, device=values[0].device) for value in values])
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        if len(set(weights)) == 1:
            return stacked.mean(0)
        return torch.tensordot(stacked.new_tensor([weight / total for weight in weights]), stacked, 1)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def combined(logs: Iterable[list[Entry]], weights: Iterable[float]) -> list[Entry]:
    """Return one value for each that micro-batches logged; `weights` are as in `merge`.

    A `reduce_fx` of the user's gets their mean, as it gets one value of a batch that is not divided.
    """
    calls: dict[tuple[str, int], list[tuple[Any, dict[str, Any], float]]] = {}
    for entries, weight in zip(logs, weights, strict=True):
        times: Counter[str] = Counter()
        for name, value, options in entries:
            calls.setdefault((name, times[name]), []).append((value, options, weight))
            times[name] += 1
    merged: list[Entry] = []
    for (name, _), of_parts in calls.items():
        values, (options, *others), counts = zip(*of_parts, strict=True)
        if options.get("batch_size") is not None:
            sizes = [each["batch_size"] for each in (options, *others)]
            options = options | {"batch_size": sum(sizes)}
        reduce_fx = options.get("reduce_fx", "mean")
        how = reduce_fx if isinstance(reduce_fx, str) and reduce_fx in _CAN_MERGE else "mean"
        merged.append((name, _merged([number(name, value) for value in values], how, counts), options))
    return merged


def _merged(numbers: list[Any], reduce_fx: str, weights: Sequence[float]) -> Any:
    if reduce_fx == "mean":
        return mean([value.double() if isinstance(value, Tensor) else value for value in numbers], weights)
    return functools.reduce(lambda total, value: combine(total, value, reduce_fx), numbers, None)
