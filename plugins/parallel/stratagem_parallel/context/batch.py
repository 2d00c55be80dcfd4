"""Cut the tensors of a batch along one dimension."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import ConfigError, nearest

_DO = "set strategy.parallel.context_dim, or name the tensors to cut in strategy.parallel.context_tensors"


def tensors_of(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of `batch` with their names: keys and numbers, joined by dots."""
    if isinstance(batch, dict | UserDict):
        items = [(str(key), item) for key, item in batch.items()]
    elif isinstance(batch, list | tuple) and not hasattr(batch, "to"):
        fields = getattr(batch, "_fields", None) or range(len(batch))
        items = [(str(key), item) for key, item in zip(fields, batch, strict=True)]
    else:
        yield name, batch
        return
    for key, item in items:
        yield from tensors_of(item, f"{name}.{key}" if name else key)


def tensors_to_cut(batch: Any, dim: int, names: tuple[str, ...] | None, size: int) -> dict[str, Tensor]:
    """Return the tensors of `batch` that are cut into `size` parts along `dim`, by name.

    Args:
        names: of tensors, or of containers of tensors; None is all that have the dimension.

    Raises:
        ConfigError: there is none, their lengths differ or do not divide, or a part of the batch cannot be cut.
    """
    leaves = dict(tensors_of(batch))
    if names is not None:
        chosen = {leaf: leaves[leaf] for leaf in leaves if any(f"{leaf}.".startswith(f"{name}.") for name in names)}
        for name in names:
            if not any(f"{leaf}.".startswith(f"{name}.") for leaf in chosen):
                raise ConfigError(
                    f"strategy.parallel.context_tensors has {name!r}; the batch has {', '.join(leaves) or 'nothing'}",
                    expected="names of its tensors", do=nearest(name, list(leaves)),
                )  # fmt: skip
        leaves = chosen
    for name, leaf in leaves.items():
        if hasattr(leaf, "to") and (not isinstance(leaf, Tensor) or (names is not None and leaf.dim() <= dim)):
            raise ConfigError(
                f"{_title(name)} is {_described(leaf)}; strategy.parallel.context cannot cut it along dimension {dim}",
                expected="tensors with this dimension in dicts, lists and tuples",
                do="change the batch in on_before_batch_transfer, or set strategy.parallel.context_tensors",
            )
    cut = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dim() > dim}
    if not cut:
        raise ConfigError(
            f"strategy.parallel.context is {size}, and no tensor of the batch has a dimension {dim}",
            expected="sequences to cut", do=_DO,
        )  # fmt: skip
    first, length = next((name, leaf.shape[dim]) for name, leaf in cut.items())
    for name, leaf in cut.items():
        if leaf.shape[dim] != length:
            raise ConfigError(
                f"{_title(first)} has length {length} along dimension {dim}, and {_title(name)} has {leaf.shape[dim]}",
                expected="one length for all tensors that strategy.parallel.context cuts", do=_DO,
            )  # fmt: skip
    if length % size:
        raise ConfigError(
            f"{_title(first)} has length {length} along dimension {dim}, and strategy.parallel.context is {size}",
            expected=f"a multiple of {size}", do="pad sequences in the loader's collate_fn",
        )  # fmt: skip
    return cut


def part_of(batch: Any, cut: dict[str, Tensor], dim: int, index: int, size: int, name: str = "") -> Any:
    """Return `batch` with part number `index` of `size` of the tensors in `cut`; containers keep their type."""
    if name in cut:
        whole = cut[name]
        length = whole.shape[dim] // size
        # A copy: a view would keep the memory of the whole sequence.
        return whole.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)

    def within(key: Any, item: Any) -> Any:
        return part_of(item, cut, dim, index, size, f"{name}.{key}" if name else str(key))

    if isinstance(batch, dict | UserDict):
        changed = copy.copy(batch)
        if isinstance(changed, UserDict):
            changed.data = dict(changed.data)
        for key, item in batch.items():
            changed[key] = within(key, item)
        return changed
    if hasattr(batch, "_fields"):
        return type(batch)(*map(within, batch._fields, batch))
    if isinstance(batch, list | tuple) and not hasattr(batch, "to"):
        return type(batch)(within(key, item) for key, item in enumerate(batch))
    return batch


def _title(name: str) -> str:
    return f"batch[{name}]" if name else "the batch"


def _described(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
