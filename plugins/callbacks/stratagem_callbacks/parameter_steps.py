"""Step some of an optimizer's parameters as a step of all of them would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from stratagem.api.parameters import needs_closure
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext


def step_some(optimizer: Optimizer, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
    """Step `parameters`, which are in `group` of `optimizer`, by its class' own rule, without hooks of its step.

    What the step counts in its group is not kept: a step without gradients, after the last part, counts it once.
    """
    groups, step = optimizer.param_groups, type(optimizer).step
    optimizer.param_groups = [group | {"params": parameters}]
    try:
        getattr(step, "__wrapped__", step)(optimizer)  # torch wraps it to call hooks
    finally:
        optimizer.param_groups = groups


def check_steps_some(run: RunContext, callback: str, any_optimizer: bool) -> None:
    """Refuse optimizers whose step of a parameter depends on others.

    Raises:
        ConfigError: an optimizer evaluates the model itself, is not known, or has hooks that see all gradients.
    """
    for optimizer in run.optimizers:
        name, found, do = type(optimizer).__name__, "", "drop the callback"
        if needs_closure(optimizer):
            found = "evaluates the model itself"
        elif getattr(optimizer, "_optimizer_step_pre_hooks", None):
            found = "has hooks before its step, which would find no gradients"
        elif not any_optimizer and not type(optimizer).__module__.startswith("torch.optim"):
            found = "is not torch's, and may compute a step from the gradients of several parameters"
            do = f"set {callback}.any_optimizer if it steps each parameter by its gradient alone"
        if found:
            raise ConfigError(
                f"{callback} was chosen, and {name} {found}", expected="one that steps each parameter alone", do=do
            )


def of_whole_tensors(optimizers: Iterable[Optimizer]) -> str:
    """Return the class of an optimizer that computes over whole matrices, which shards are not; "" without any."""
    kinds = (torch.optim.Muon, torch.optim.Adafactor)
    return next((type(each).__name__ for each in optimizers if isinstance(each, kinds)), "")
