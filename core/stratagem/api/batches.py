"""A batch as a tree of tensors: map it, move it to a device. A loader with other samplers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader


def replace_in_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of `loader` with other samplers, whatever its class and the signature of its ``__init__``."""
    clone = copy.copy(loader)
    # DataLoader forbids setting these after __init__ because it cannot rebuild what depends on them; we can.
    clone.__dict__.update(attributes, _iterator=None)
    return clone


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor (or object with ``.to``) on `device`; containers keep their type."""
    kind = type(batch)
    if kind is torch.Tensor:
        return move_leaf(batch, device)
    if kind is list or kind is tuple:
        return kind([move_leaf(part, device) if type(part) is torch.Tensor else move_batch(part, device)
                     for part in batch])  # fmt: skip
    return map_batch(batch, lambda leaf: move_leaf(leaf, device), is_leaf=lambda part: hasattr(part, "to"))


def move_leaf(leaf: Any, device: torch.device) -> Any:
    """Return a part of a batch on `device`: a tensor, an object with ``.to``, or anything else as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.device == device else leaf.to(device, non_blocking=leaf.device.type == "cpu")
    if isinstance(leaf, PackedSequence):
        sequence: Any = leaf  # torch's signature of `to` has no device
        return sequence.to(device, non_blocking=leaf.data.device.type == "cpu")
    return leaf.to(device) if hasattr(leaf, "to") else leaf


def map_batch(
    batch: Any, change: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] = lambda part: isinstance(part, PackedSequence),
) -> Any:  # fmt: skip
    """Return `batch` with `change` applied to all that is not a list, tuple or dict in it; containers keep their type.

    Args:
        is_leaf: whether a container is changed as one. A packed sequence always has to be: its lengths stay on the CPU.
    """
    if not isinstance(batch, list | tuple | dict) or is_leaf(batch):
        return change(batch)
    if isinstance(batch, dict):
        items = {key: map_batch(item, change, is_leaf) for key, item in batch.items()}
        if not isinstance(batch, defaultdict):
            return type(batch)(items)  # a copy might keep attributes that hold the tensors from before
        changed = copy.copy(batch)  # its first argument makes the missing values
        changed.update(items)
        return changed
    parts = [map_batch(item, change, is_leaf) for item in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
