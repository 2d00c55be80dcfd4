"""Which rank of a pipeline holds which parameters and buffers.

[Note: holders]
Every rank has the whole module, with all names. A parameter is *held* by the ranks whose stages use it; on the others
it is on the meta device, and never gets a gradient. A parameter outside the pipelined module may be used before it and
after it, in evaluation on all ranks, since each of them runs the user's step then: all ranks hold it. A parameter that
several ranks hold, or that is tied to one of another stage, has a copy on each: their gradients are summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stratagem.api.parameters import replace_parameter
from stratagem_parallel.pipeline.ghosts import Cut


def uses(user: nn.Module, cut: Cut, rank_of: Callable[[int], int]) -> dict[str, frozenset[int]]:
    """Return, for each parameter and buffer by name, which ranks of the pipeline compute with it under this name."""
    of_tensor: dict[str, set[int]] = {}
    for index, stage in enumerate(cut.stages):
        for name in stage.tensors:
            of_tensor.setdefault(name, set()).add(rank_of(index))
        for module in stage.modules:
            for name, _ in _named_tensors(user.get_submodule(module), f"{module}."):
                of_tensor.setdefault(name, set()).add(rank_of(index))
    outside = frozenset(map(rank_of, range(len(cut.stages))))
    return {name: frozenset(of_tensor.get(name, outside)) for name, _ in _named_tensors(user)}


def holders(user: nn.Module, used: dict[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Return which ranks hold each parameter and buffer: those that use it under any of its names."""
    by_identity: dict[int, frozenset[int]] = {}
    named = list(_named_tensors(user))
    for name, tensor in named:
        by_identity[id(tensor)] = by_identity.get(id(tensor), frozenset()) | used[name]
    return {name: by_identity[id(tensor)] for name, tensor in named}


def forget_others(user: nn.Module, held: dict[str, frozenset[int]], rank: int) -> None:
    """Move to the meta device what `rank` does not hold."""
    made: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # no other gets their ids
    for where, module in user.named_modules():
        prefix = f"{where}." if where else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is None or rank in held[prefix + name]:
                continue
            if id(parameter) not in made:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                empty = made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                replace_parameter(empty, parameter)
                kept.append(parameter)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and rank not in held[prefix + name]:
                module._buffers[name] = buffer.to("meta")


@contextlib.contextmanager
def only_used(user: nn.Module, used: dict[str, frozenset[int]], rank: int) -> Iterator[None]:
    """Hide from `user`, within, the parameters that `rank` does not use; afterwards tie again what was tied."""
    groups: dict[int, list[tuple[bool, nn.Module, str]]] = {}
    hidden: list[tuple[nn.Module, dict[str, Any]]] = []
    prefixes: dict[nn.Module, list[str]] = {}
    for name, module in user.named_modules(remove_duplicate=False):
        prefixes.setdefault(module, []).append(f"{name}." if name else "")
    for module, names in prefixes.items():  # one that is called in several stages has several names
        present = [name for name, parameter in module._parameters.items() if parameter is not None]
        in_use = {name for name in present if any(rank in used[prefix + name] for prefix in names)}
        for name in present:
            groups.setdefault(id(module._parameters[name]), []).append((name in in_use, module, name))
        if len(in_use) < len(present):
            hidden.append((module, dict(module._parameters)))
            for name in set(present) - in_use:
                module._parameters.pop(name)
    try:
        yield
    finally:
        for module, before in hidden:
            now, order = dict(module._parameters), list(before)
            module._parameters.clear()
            module._parameters.update({name: now.get(name, before[name]) for name in order})
        for places in groups.values():
            chosen = next((module._parameters[name] for is_used, module, name in places if is_used), None)
            for _, module, name in places if chosen is not None else ():
                module._parameters[name] = chosen


def _named_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in module.named_modules(remove_duplicate=False):
        for tensors in (each._parameters, each._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield prefix + (f"{name}.{key}" if name else key), tensor
