"""Read what Lightning writes: a file of torch.save with values of any class, and a folder of FSDP.

No code of a checkpoint is executed. torch reads tensors, plain values and a few classes that hold data. A value of any
other class, such as a loss function among the hyper-parameters, is left out, and ``left_out`` of the state names it.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

#: The key by which a checkpoint of Lightning is recognised.
VERSION = "pytorch-lightning_version"
_HPARAMS = "hyper_parameters"


class _Mapping:
    """Stands for classes of dictionaries: makes a plain one, which torch then fills."""

    def __new__(cls, *_: Any) -> Any:
        return {}


class _LeftOut:
    """Stands for an object of a class that is not read: takes any arguments and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> _LeftOut:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


#: Classes that only hold data, by the names that checkpoints have for them.
_DATA: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "collections.defaultdict": _Mapping,
    "lightning_fabric.utilities.data.AttributeDict": _Mapping,
    "lightning.fabric.utilities.data.AttributeDict": _Mapping,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,
}  # fmt: skip


def read(path: Path) -> dict[str, Any] | None:
    """Return the state of a file that torch's weights-only loader refuses; None if Lightning did not write it."""
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    allowed = [(_DATA.get(name) or type("_LeftOut", (_LeftOut,), {}), name) for name in unknown]
    with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not (isinstance(state, dict) and VERSION in state):
        return None
    left_out: list[str] = []
    read_state: dict[str, Any] = _plain(state, "", left_out)
    if not left_out:
        return read_state
    arguments = [re.split(r"[.\[]", name)[1] for name in left_out if name.startswith(f"{_HPARAMS}.")]
    kept = {name: value for name, value in read_state.get(_HPARAMS, {}).items() if name not in arguments}
    return read_state | {"left_out": left_out, _HPARAMS: kept, "hparams_left_out": list(dict.fromkeys(arguments))}


def _plain(value: Any, where: str, left_out: list[str]) -> Any:
    """Return `value` with data of other classes as plain values, without the items that hold anything else.

    Where that was is added to `left_out`. Of a list nothing is left then: the places of its items have a meaning.
    """
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, Mapping):
        items = {key: _plain(item, f"{where}.{key}".lstrip("."), left_out) for key, item in value.items()}
        return {key: item for key, item in items.items() if not _is_left_out(item)}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        found = type(value)(_plain(item, f"{where}[{number}]", left_out) for number, item in enumerate(value))
        return next(filter(_is_left_out, found), found)
    if _is_left_out(value):
        left_out.append(where)
    return value


def _is_left_out(value: Any) -> bool:
    """Whether `value` stands for an object, or for a class or function that was saved by its name."""
    return isinstance(value, _LeftOut) or (isinstance(value, type) and issubclass(value, _LeftOut))


# --- Folders -----------------------------------------------------------------------------------------------------


def state_of_folder(path: Path, index: Metadata, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the state of such a folder, as Lightning saves it in one file; optimizers have names of parameters.

    Args:
        tensors: all tensors of the folder, by their names in `index`.
        rest: what rank 0 wrote beside them.
    """
    tree: dict[Any, Any] = {}
    for name, keys in index.planner_data.items():
        part = tree
        for key in keys[:-1]:
            part = part.setdefault(key, {})
        part[keys[-1]] = tensors[name] if name in tensors else _value(path, index, name)
    optimizers = [tree[key] for key in sorted(tree) if str(key).startswith("optimizer_")]
    for each in optimizers:
        each["param_groups"] = _listed(each["param_groups"])
        each["state"] = each.get("state", {})
    return rest | {"state_dict": tree.get("model", tree.get("state_dict", {})), "optimizer_states": optimizers}


def _listed(items: Any) -> list[Any]:
    return (
        list(items)
        if isinstance(items, Iterable) and not isinstance(items, Mapping)
        else [items[n] for n in sorted(items)]
    )


def _value(path: Path, index: Metadata, name: str) -> Any:
    """Return a plain value, which torch saves as a file of torch.save within another one."""
    info = index.storage_data[MetadataIndex(name)]
    with (path / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
