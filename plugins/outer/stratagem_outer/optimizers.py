"""Optimizers of diverging replicas: which are refused, which of their state is averaged, and which is saved by rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stratagem.api.parameters import needs_closure
from stratagem.errors import ConfigError
from stratagem_process_group.messages import is_averaged, local_tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.api import Collectives, RunContext

#: Optimizers that communicate with all ranks themselves.
_DISTRIBUTED_OPTIMIZERS = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer"}


def check_optimizers(path: str, optimizers: list[Optimizer], run: RunContext) -> None:
    """Refuse optimizers with which replicas cannot diverge and be averaged again.

    Raises:
        ConfigError: names the plugin by `path`, and the optimizer.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if needs_closure(optimizer):
            raise ConfigError(
                f"{path} was given {name}, which evaluates the model several times a step",
                expected="an optimizer that steps without a closure, such as AdamW",
                do="use such an optimizer, or a strategy that averages gradients, such as ddp",
            )
        if _DISTRIBUTED_OPTIMIZERS & {cls.__name__ for cls in type(optimizer).__mro__}:
            raise ConfigError(
                f"{path} was given {name}, which synchronizes the parameters of all ranks itself",
                expected="an optimizer that does not communicate",
                do="use the optimizer that it wraps",
            )
    if len(optimizers) > 1 and not run.manual:
        raise ConfigError(
            f"{path} was given {len(optimizers)} optimizers, which are stepped one by one",
            expected="one optimizer, so that the end of each step is known",
            do="use one with parameter groups, or a Trainer and a module that sets automatic_optimization = False and "
            "steps them in training_step",
        )
    if run.manual and run.shards_parameters:
        raise ConfigError(
            f"{path} around sharded parameters was given {type(run.module).__name__}, which uses manual optimization",
            expected="automatic optimization, without which parameters may be gathered during a sync",
            do="set automatic_optimization = True, or use a strategy inside that does not shard parameters",
        )


def averaged_moments(optimizer: Optimizer, group: Collectives) -> dict[str, Tensor]:
    """Return the tensors of `optimizer` that are averaged: those of a parameter's shape that exist in all teams.

    Collective over `group`. The keys are the parameter's number and the name of the tensor.
    """
    found = {
        f"{number} {key}": local_tensor(value)
        for number, parameter in enumerate(parameters_of(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and is_averaged(value) and key != "step"
    }
    signatures = {name: (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in found.items()}
    everywhere = set.intersection(*map(set, group.all_gather_object(list(signatures.values()))))
    return {name: found[name] for name in found if signatures[name] in everywhere}


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def local_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return CPU copies of this rank's part of the optimizer's state, for each parameter."""
    return [
        {
            key: local_tensor(value).to("cpu", copy=True) if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
        for entry in (optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer))
    ]


def restore_local_state(optimizer: Optimizer, entries: list[dict[str, Any]]) -> None:
    """Overwrite the state of `optimizer`, loaded from the average, with what `local_state` returned."""
    for parameter, entry in zip(parameters_of(optimizer), entries, strict=True):
        if not entry:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for key, value in entry.items():
            current = state.get(key)
            if isinstance(current, Tensor):
                local_tensor(current).copy_(value)
            else:
                state[key] = value.to(parameter.device) if isinstance(value, Tensor) else value
