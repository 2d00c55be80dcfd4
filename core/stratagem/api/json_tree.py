"""Convert a state to JSON and a list of its tensors, so that checkpoint formats can store it without a pickle.

Values that JSON does not have are mappings with a key ``"$"``: tensors (by number), tuples, mappings with other keys
than text, floats that are not numbers, bytes, complex numbers, dtypes and devices.
"""

from __future__ import annotations

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
        pairs = [(encode(key, place, path), encode(item, place, f"{inner}{key}")) for key, item in value.items()]
        plain = all(isinstance(key, str) for key in value) and "$" not in value
        return dict(pairs) if plain else {"$": "mapping", "items": [list(pair) for pair in pairs]}
    if isinstance(value, list | tuple):
        items = [encode(item, place, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        finite = value == value and abs(value) != float("inf")
        return float(value) if finite else {"$": "float", "text": repr(float(value))}
    if isinstance(value, str | int):  # enumerations that are text or numbers
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), place, path)
    for name, (kind, _) in _NAMED.items():
        if isinstance(value, kind):
            return {"$": name, "text": value.hex() if isinstance(value, bytes) else str(value)}
    raise CheckpointError(
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
