"""Explain torch's error for an operation on sharded parameters: name them and their FSDP unit, and what to do."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigError
from stratagem_sharding.param_groups import param_groups

#: Part of torch's message about an operation that mixes plain tensors and shards (`DTensor`).
_MIXED = "mixed torch.Tensor and DTensor"


def is_sharded_use(error: BaseException) -> bool:
    """Whether `error` is torch's error for an operation that mixes plain tensors and shards."""
    return _MIXED in str(error)


def sharded_use(error: BaseException, root: nn.Module, policy: str) -> ConfigError:
    """Return the error for an operation on parameters whose unit is not gathered, with their names where found.

    `policy` is the option that chooses units.
    """
    names, units = _shards_of(root)
    found = {names[id(tensor)] for tensor in tensors_in_use(error) if id(tensor) in names}
    some = sorted(found) or sorted(units)
    inside = sorted({units[name] for name in some} - {""})
    which = f" of the unit{'s' * (len(inside) > 1)} {few([repr(name) for name in inside])}" if inside else ""
    verb = "was" if len(some) == 1 else "were"
    among = "" if found else "some of "
    return ConfigError(
        f"{among}{few([repr(name) for name in some])}{which} {verb} used while sharded, outside of the unit's forward",
        expected="parameters that are used within the forward of their own unit, which gathers them",
        do=f"leave that layer out of {policy}, or make the module that uses its parameters a unit",
    )


def _shards_of(root: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Return the names of the parameters that are sharded now, by their ids; and the unit of each name."""
    names: dict[int, str] = {}
    units: dict[str, str] = {}
    for prefix, part in root.named_modules():
        for group in param_groups(part._get_fsdp_state()) if isinstance(part, FSDPModule) else ():
            for each in group.fsdp_params if not group.is_unsharded else ():
                name = names[id(each.sharded_param)] = each._param_fqn.removeprefix("module.")
                units[name] = prefix.removeprefix("module").removeprefix(".")
    return names, units


def tensors_in_use(error: BaseException) -> Iterator[Any]:
    """Yield the local variables of the innermost function with shards, and the attributes that its failed line uses."""
    for trace in reversed(list(_traces(error.__traceback__))):
        frame = trace.tb_frame
        found = [value for value in frame.f_locals.values() if isinstance(value, DTensor)]
        first, last, *_ = list(frame.f_code.co_positions())[trace.tb_lasti // 2]
        for number in range(first or trace.tb_lineno, (last or trace.tb_lineno) + 1):
            line = linecache.getline(frame.f_code.co_filename, number)
            found += [_look_up(frame.f_locals, path) for path in re.findall(r"[^\W\d]\w*(?:\.\w+|\[\d+\])+", line)]
        if any(isinstance(value, DTensor) for value in found):
            yield from found
            return


def _traces(trace: Any) -> Iterator[Any]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _look_up(variables: Mapping[str, Any], path: str) -> Any:
    """Return what a `path` such as ``self.layers[0].weight`` is, if it is a part of a module; None if not."""
    first, *rest = re.findall(r"\w+", path)
    value = variables.get(first)
    for name in rest:
        known = isinstance(value, nn.Module) and any(name in those for those in (value._modules, value._parameters))
        value = getattr(value, name) if known else None
    return value


def few(items: list[Any], limit: int = 4) -> str:
    """Return the first `limit` of `items` as text, and how many there are more."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{', '.join(map(str, items[:limit]))}{more}"
