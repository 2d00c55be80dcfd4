"""Optimizers step the parameters of the model, also where a strategy has replaced them since they were made."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stratagem.api.named_state import parameter_names
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


def point_at(
    module: nn.Module, optimizers: list[Optimizer], where: str, strategy: str, each_once: bool, warns: bool
) -> None:
    """Let `optimizers` step the parameters of `module` that took the place of those that they were made of.

    Args:
        where: what made them, for messages.
        strategy: what replaced parameters, for messages.
        each_once: all of them step at the same time, so that each parameter belongs in one of them.
        warns: say which trainable parameters no optimizer steps.

    Raises:
        ConfigError: an optimizer has parameters that are not the module's, or one twice.
    """
    current, names = dict(module.named_parameters()), parameter_names(module)
    every: set[str] = set()
    for optimizer in optimizers:
        taken = every if each_once else set()
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):  # in place: an optimizer may keep the list
                if id(parameter) not in names:
                    group["params"][number] = now = _now(parameter, current, strategy)
                    if (state := getattr(optimizer, "state", {}).pop(parameter, None)) is not None:
                        optimizer.state[now] = state
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        title = f"{where} returned {type(optimizer).__name__} with"
        if foreign := [p for p in stepped if id(p) not in names]:
            raise ConfigError(
                f"{title} {len(foreign)} of {len(stepped)} parameters that are not of {type(module).__name__}, the "
                f"first of shape {tuple(foreign[0].shape)}",
                expected="parameters of the module that is trained",
                do="make what has them an attribute of the module",
            )
        for name in (names[id(p)] for p in stepped):
            if name in taken:
                raise ConfigError(
                    f"{title} {name!r}, which is in an optimizer already",
                    expected="each parameter once in all groups and optimizers",
                    do="leave it out of one; look up what was kept in __init__, as in self.layer.parameters()",
                )
            taken.add(name)
        every |= taken
    trained = [name for name, parameter in current.items() if parameter.requires_grad]
    missing = [name for name in trained if name not in every]
    if warns and optimizers and missing:
        some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        warnings.warn(
            f"no optimizer steps {len(missing)} of {len(trained)} trainable parameters: {some}; "
            "if that is meant, set their requires_grad to False",
            stacklevel=2,
        )


def begun_on_meta(optimizers: list[Optimizer]) -> bool:
    """Whether one of `optimizers` has made state of parameters that have no values yet."""
    return any(parameter.is_meta for optimizer in optimizers for parameter in getattr(optimizer, "state", ()))


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
