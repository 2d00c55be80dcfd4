"""What other ranks' stages return, in a plan: no other rank is there to tell it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stratagem_parallel.pipeline.ghosts import Cut, Given, Record


class Outline:
    """A model before axes divide it, with shapes and no memory. Only for a plan, whose tensors have no values.

    Args:
        user: the user's module.
        cut: cuts a module into stages.
        device: on which stages compute.
    """

    def __init__(self, user: nn.Module, cut: Callable[[nn.Module], Cut], device: torch.device) -> None:
        self._user, self._device = _copied(user, _Tensors(torch.device("meta"))), device
        self._cut = cut(self._user)

    def advanced(self, given: Given, record: Record, values: Any) -> tuple[Any, Any]:
        """Return what all parts of a model return that is cut between them, and what a rank would tell of that."""
        with self._on_device():
            return self._cut.advanced(None, given, record, values, lambda value: value)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        before = [(part, part._parameters, part._buffers) for part in self._user.modules()]
        _fill(self._user, _Tensors(self._device))
        try:
            yield
        finally:
            for part, parameters, buffers in before:
                part._parameters, part._buffers = parameters, buffers

    def same_stages(self, one: int, other: int) -> bool:
        """Whether two stages have layers of the same classes and shapes."""
        return self._described(one) == self._described(other)

    def _described(self, number: int) -> list[Any]:
        stage = self._cut.stages[number]
        modules = [self._user.get_submodule(name) for name in stage.modules]
        parts = [(name, type(part)) for module in modules for name, part in module.named_modules()]
        tensors = [
            (name, each.shape, each.dtype)
            for module in modules
            for name, each in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
        ]
        return [parts, tensors, len(stage.tensors)]


class _Tensors:
    """Makes tensors on `device` of the shapes of others, and the same one for one that is met again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            values = torch.empty_like(tensor.detach(), device=self._device)
            is_parameter = isinstance(tensor, nn.Parameter)
            self._made[id(tensor)] = tensor, nn.Parameter(values, requires_grad=False) if is_parameter else values
        return self._made[id(tensor)][1]


def _copied(module: nn.Module, tensors: _Tensors) -> nn.Module:
    """Return a copy of `module` and all in it with other tensors; the rest is shared."""
    made: dict[nn.Module, nn.Module] = {}
    for part in module.modules():
        made[part] = part.__new__(type(part))
        # A forward that another plugin has replaced is of the original; it computes the same.
        made[part].__dict__ = {name: value for name, value in part.__dict__.items() if name != "forward"}
    for part, copied in made.items():
        copied._modules = {name: child and made[child] for name, child in part._modules.items()}
    _fill(made[module], tensors)
    return made[module]


def _fill(module: nn.Module, tensors: _Tensors) -> None:
    """Give `module` and all in it `tensors` of the shapes of theirs."""
    for part in module.modules():
        for held in ("_parameters", "_buffers"):
            known = getattr(part, held).items()
            setattr(part, held, {name: None if each is None else tensors.like(each) for name, each in known})
