"""Combine the outputs of the replicas on the first device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stratagem.api.batches import move_batch
from stratagem.errors import ConfigError


def gather(outputs: list[Any], device: torch.device, merge: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return the outputs of all replicas as one value on `device`.

    Args:
        outputs: of the replicas, in the order of their chunks.
        device: of the returned tensors.
        merge: combines numbers, and tensors without dimensions, of which each replica returned one.
    """
    first = outputs[0]
    _check_same_structure(outputs)
    if isinstance(first, Tensor):
        return _gather_tensors([output.to(device) for output in outputs], merge)
    if isinstance(first, int | float):
        return merge([torch.as_tensor(output, device=device) for output in outputs])
    if isinstance(first, dict):
        return type(first)({key: gather([output[key] for output in outputs], device, merge) for key in first})
    if isinstance(first, tuple):
        items = [gather(list(items), device, merge) for items in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, list):
        return [move_batch(item, device) for output in outputs for item in output]
    return None if first is None else outputs


def _gather_tensors(tensors: list[Tensor], merge: Callable[[list[Tensor]], Tensor]) -> Tensor:
    if not tensors[0].dim():
        return merge(tensors)
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"replicas returned tensors of the shapes {shapes}",
            expected="the same shape in all dimensions but 0, along which they are concatenated",
            do="pad them to the same shape, or return them in a list",
        )
    return torch.cat(tensors)


def _check_same_structure(outputs: list[Any]) -> None:
    """Refuse outputs of different types, or containers of different lengths or keys."""

    def structure(output: Any) -> str:
        if isinstance(output, dict):
            return f"a dictionary of {', '.join(sorted(map(repr, output)))}"
        if isinstance(output, tuple):
            return f"a tuple of {len(output)}"
        if isinstance(output, Tensor):
            return "a tensor" if output.dim() else "a tensor without dimensions"
        return type(output).__name__

    structures = list(dict.fromkeys(map(structure, outputs)))
    if len(structures) > 1:
        raise ConfigError(
            f"replicas returned {' and '.join(structures)} for chunks of one batch",
            expected="the same from all of them",
        )


def mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    """Return the mean over all samples of the means over chunks of these `sizes`."""
    weighted = [value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True)]
    return functools.reduce(torch.add, weighted)
