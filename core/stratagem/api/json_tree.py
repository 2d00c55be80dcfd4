"""Convert a state to JSON and a list of its tensors, so that checkpoint formats can store it without a pickle.

Values that JSON does not have are mappings with a key ``"$"``: tensors (by number), tuples, mappings with other keys
than text, floats that are not numbers, bytes, complex numbers, dtypes and devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stratagem.errors import CheckpointError


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text} is not a dtype")
    return dtype


_BASES: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes)
#: What checkpoints store, beside tensors and containers.
PLAIN = (type(None), *_BASES, torch.dtype, torch.device)
#: What JSON has itself.
_JSON = (type(None), bool, int, str)
#: What is stored as text under a mark of its own: its type, and how it is read.
_NAMED: dict[str, tuple[type[Any], Callable[[str], Any]]] = {
    "float": (float, float), "bytes": (bytes, bytes.fromhex), "complex": (complex, complex),
    "dtype": (torch.dtype, _dtype), "device": (torch.device, torch.device),
}  # fmt: skip


def encode(value: Any, place: Callable[[torch.Tensor, str], int], path: str = "") -> Any:
    """Return `value` as JSON has it; `place` takes each tensor with its path and returns the number it goes by.

    Raises:
        CheckpointError: names the path of a value that is not a tensor, number, string or container.
    """
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", "number": place(value.detach(), path)}
    if isinstance(value, Mapping):
        inner = f"{path}." if path else ""
        items = [v if type(v) in _JSON else encode(v, place, f"{inner}{key}") for key, v in value.items()]
        if all(isinstance(key, str) for key in value) and "$" not in value:
            return dict(zip(map(str, value), items, strict=True))
        return {"$": "mapping", "items": [[encode(key, place, path), v] for key, v in zip(value, items, strict=True)]}
    if isinstance(value, list | tuple):
        items = [v if type(v) in _JSON else encode(v, place, f"{path}[{index}]") for index, v in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    value = as_plain(value, path)
    for name, (kind, _) in _NAMED.items():
        if isinstance(value, kind) and not (kind is float and math.isfinite(value)):
            return {"$": name, "text": value.hex() if isinstance(value, bytes) else str(value)}
    return value


def as_plain(value: Any, path: str) -> Any:
    """Return a `value` that is neither a tensor nor a container in a type that torch's weights-only loader accepts.

    Raises:
        CheckpointError: it has none; names `path`.
    """
    if type(value) in PLAIN:
        return value
    for kind in _BASES:  # of enumerations and numpy scalars that are numbers too
        if isinstance(value, kind):
            return kind(value)
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    if is_scalar and type(item := value.item()) in PLAIN:
        return item
    if isinstance(value, Path):
        return str(value)
    raise refusal(value, path)


def refusal(value: Any, path: str) -> CheckpointError:
    """Return the error to raise for a `value` that cannot be stored."""
    return CheckpointError(
        f"{path or 'the checkpoint'} is a {type(value).__name__}",
        expected="tensors, numbers, strings and containers of them: all that can be loaded safely",
        do="convert it in state_dict() or on_save_checkpoint()",
    )


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what `encode` was given, with `tensors` by their numbers.

    Raises:
        KeyError, IndexError, TypeError, ValueError: `value` does not come from `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        return tensors[value["number"]]
    if kind in _NAMED:
        return _NAMED[kind][1](value["text"])
    items = [decode(item, tensors) for item in value["items"]]
    if kind == "tuple":
        return tuple(items)
    if kind == "mapping":
        return {_hashable(key): item for key, item in items}
    raise ValueError(f"unknown mark {kind!r}")


def _hashable(key: Any) -> Any:
    return tuple(_hashable(item) for item in key) if isinstance(key, list) else key
