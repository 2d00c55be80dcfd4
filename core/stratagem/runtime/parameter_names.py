"""Optimizers step the parameters of the model, also where a strategy has replaced them since they were made."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stratagem.api.parameters import NAME
from stratagem.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@contextlib.contextmanager
def named_parameters(module: nn.Module) -> Iterator[None]:
    """Within, each parameter of `module` knows its name, also after another has taken its place."""
    for name, parameter in module.named_parameters():
        parameter.__dict__[NAME] = name
    try:
        yield
    finally:
        for parameter in module.parameters():
            parameter.__dict__.pop(NAME, None)


def point_at(module: nn.Module, optimizers: list[Optimizer], where: str, strategy: str, warns: bool) -> None:
    """Let `optimizers` step the parameters of `module` that took the place of those that they were made of.

    Args:
        where: what made them, for messages.
        strategy: what replaced parameters, for messages.
        warns: say which trainable parameters no optimizer steps.

    Raises:
        ConfigError: an optimizer has parameters that are not the module's.
    """
    current = dict(module.named_parameters())
    ids = {id(parameter) for parameter in current.values()}
    for optimizer in optimizers:
        foreign = []
        for group in optimizer.param_groups:
            if not all(id(p) in ids for p in group["params"]):
                group["params"] = [p if id(p) in ids else _now(p, current, strategy) for p in group["params"]]
                foreign += [p for p in group["params"] if id(p) not in ids]
        if foreign:
            raise ConfigError(
                f"{where} returned {type(optimizer).__name__} with {len(foreign)} of {_count(optimizer)} parameters "
                f"that are not of {type(module).__name__}, the first of shape {tuple(foreign[0].shape)}",
                expected="parameters of the module that is trained",
                do="make what has them an attribute of the module",
            )
    if warns and optimizers:
        _tell_missing(current, optimizers)


def _now(parameter: Any, current: dict[str, nn.Parameter], strategy: str) -> Any:
    """Return the parameter that took the place of `parameter`; itself if it was never the model's."""
    name = parameter.__dict__.get(NAME)
    if name is None:
        return parameter
    if name not in current:
        raise PluginError(
            f"{strategy} renamed the parameter {name!r}", expected="names to stay",
            do="make the optimizer in Module.configure_optimizers, and tell the strategy's author",
        )  # fmt: skip
    return current[name]


def _tell_missing(current: dict[str, nn.Parameter], optimizers: list[Optimizer]) -> None:
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, parameter in current.items() if parameter.requires_grad]
    missing = [name for name in trained if id(current[name]) not in stepped]
    if missing:
        some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        warnings.warn(
            f"no optimizer steps {len(missing)} of {len(trained)} trainable parameters: {some}; "
            "if that is meant, set their requires_grad to False",
            stacklevel=2,
        )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
