"""Replicas of a module for one step, and what a replica must not be used for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError


def replicate(steps: nn.Module, devices: Sequence[torch.device]) -> list[Any]:
    """Return a replica of `steps` on each device, whose gradients reach the parameters of `steps`.

    The first replica uses the buffers of `steps`; the others have copies.
    """
    if devices[0].type == "cpu":
        copies = [_shallow_copy(steps, own_buffers=index > 0) for index in range(len(devices))]
    else:
        copies = nn.parallel.replicate(steps, list(devices), detach=not torch.is_grad_enabled())
    for copy in copies:
        for module in list(copy.modules()):
            # torch hides them, since they are not leaves: a step that sums over `parameters()` would find none.
            module._parameters.update(getattr(module, "_former_parameters", {}))
            for name, child in module._modules.items():
                if accumulates(child):
                    module._modules[name] = RefusedInReplica(type(child).__name__)
    return list(copies)


def _shallow_copy(network: nn.Module, own_buffers: bool) -> nn.Module:
    """Return a copy of the tree of modules that shares the parameters."""
    originals = list(network.modules())
    copies: dict[nn.Module, nn.Module] = {module: module._replicate_for_data_parallel() for module in originals}
    for module, copy in copies.items():
        copy._parameters = dict(module._parameters)
        copy._modules = {name: None if child is None else copies[child] for name, child in module._modules.items()}
        if own_buffers:
            copy._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    return copies[network]


def accumulates(value: Any) -> bool:
    """Whether `value` has the methods of a metric that accumulates over batches, as those of torchmetrics do."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


class RefusedInReplica(nn.Module):
    """Replaces a metric that accumulates over batches, in a replica, whose state is lost after the step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.__dict__["name"] = name

    def forward(self, *_: Any, **__: Any) -> Any:
        raise refused_in_replica(self.name)

    def __getattr__(self, _: str) -> Any:
        raise refused_in_replica(self.name)


def refused_in_replica(name: str) -> ConfigError:
    """Return the error for a metric that is used in a replica."""
    return ConfigError(
        f"a step used a {name}, which accumulates over batches, on a part of a batch",
        expected="it to be used where the outputs of the whole batch are gathered",
        do="use it in validation_step_end, or the _end method of the step in question",
    )


class AttributeCheck:
    """Detects attributes and buffers that a step sets on a replica, where they are lost after the step."""

    def __init__(self, replica: Any, method: str) -> None:
        self.module, self.method = replica.module, "forward" if method == "__call__" else method
        self.attributes = dict(self.module.__dict__)
        self.buffers = [(module, dict(module._buffers)) for module in replica.modules()]

    def raise_if_changed(self) -> None:
        """Raise if the step set a public attribute of the user's module, or a buffer of any module in it."""
        absent = object()
        lost = [
            name
            for name, value in self.module.__dict__.items()
            if not name.startswith("_") and self.attributes.get(name, absent) is not value
        ]
        for module, before in self.buffers:
            lost += [name for name, value in module._buffers.items() if before.get(name, absent) is not value]
        if lost:
            raise ConfigError(
                f"{type(self.module).__name__}.{self.method} set {lost[0]} on a replica, which is dropped after it",
                expected="a step that sets no attribute when it runs on several devices",
                do="change it in place, append to a list, or set it in the step's _end method or in an event",
            )
