"""What a replica that comes back receives from another one, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigError
from stratagem_process_group.messages import local_tensor
from stratagem_torchft.messages import with_layout_of
from stratagem_trainer.api import has_role

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: What of the progress of training is the same in all replicas.
_PROGRESS = ("epoch", "global_step", "batches_done", "epoch_done", "skipped_steps")


def captured(run: RunContext) -> dict[str, Any]:
    """Return copies on the CPU of this rank's part of the model, the optimizers and the schedulers."""
    assert run.module is not None, "set before wrap_model"
    return {
        "tensors": {name: _copy(tensor) for name, tensor in _tensors(run.module).items()},
        "optimizers": [_of_optimizer(optimizer) for optimizer in run.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
    }


def applied(state: Mapping[str, Any], run: RunContext) -> None:
    """Put what `captured` returned on the same rank of another replica into this one."""
    assert run.module is not None, "set before wrap_model"
    own = _tensors(run.module)
    with torch.no_grad():
        for name, values in state["tensors"].items():
            if name not in own or local_tensor(own[name]).shape != values.shape:
                raise ConfigError(
                    f"another replica sent {name!r} of shape {tuple(values.shape)}, which this one "
                    + (f"has in shape {tuple(local_tensor(own[name]).shape)}" if name in own else "does not have"),
                    expected="the same model in all replicas, spread over the same number of processes",
                )
            local_tensor(own[name]).copy_(values)
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        _restore_optimizer(optimizer, saved)
    for config, saved in zip(run.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)


def progress_of(trainer: TrainerView) -> dict[str, Any]:
    """Return how far training has come."""
    return {name: getattr(trainer.position, name) for name in _PROGRESS}


def apply_progress(trainer: TrainerView, progress: Mapping[str, Any]) -> None:
    """Continue where another replica is: its epoch, its step, and this replica's batch of the same number.

    Call it before the first epoch begins: it makes the loop open the epoch at that batch.
    """
    position: Any = trainer.position
    for name in _PROGRESS:
        setattr(position, name, progress[name])
    position.epoch_ended, position.validated, position.epoch_random_state = False, True, None


def count_as(trainer: TrainerView, progress: Mapping[str, Any], pending: int) -> None:
    """Take over the number of steps of another replica within an epoch, of which the loop counts `pending` itself."""
    position: Any = trainer.position
    position.global_step = progress["global_step"] - pending
    position.skipped_steps = progress["skipped_steps"] - pending


def callbacks_of(trainer: TrainerView) -> list[tuple[str, Any]]:
    """Return the states of callbacks, such as that of early stopping; not of those that keep checkpoints, whose files
    are this replica's own."""
    return [(type(each).__qualname__, each.state_dict()) for each in _stateful(trainer)]


def apply_callbacks(trainer: TrainerView, states: list[tuple[str, Any]]) -> None:
    """Apply what `callbacks_of` returned in another replica to callbacks of the same classes."""
    waiting = list(states)
    for each in _stateful(trainer):
        found = next((entry for entry in waiting if entry[0] == type(each).__qualname__), None)
        if found is not None:
            waiting.remove(found)
            each.load_state_dict(found[1])


def _stateful(trainer: TrainerView) -> list[Any]:
    both = ("state_dict", "load_state_dict")
    return [
        each
        for each in trainer.callbacks
        if all(callable(getattr(each, name, None)) for name in both) and not has_role(each, "best-checkpoint")
    ]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if not tensor.is_meta}


def _copy(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).to("cpu", copy=True)


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of each group, and the state of each parameter in the order of the groups."""
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "state": [
            {
                key: (_copy(value), value.device.type) if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(parameter, {}).items()
            }
            for group in optimizer.param_groups
            for parameter in group["params"]
        ],
    }


def _restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(options)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, entry in zip(parameters, saved["state"], strict=True):
        optimizer.state.pop(parameter, None)
        if entry:
            optimizer.state[parameter] = {key: _restored(value, parameter) for key, value in entry.items()}


def _restored(value: Any, parameter: Tensor) -> Any:
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)):
        return value
    tensor, device_type = value
    tensor = tensor.to("cpu" if device_type == "cpu" else parameter.device)
    return with_layout_of(tensor, parameter) if tensor.shape == local_tensor(parameter).shape else tensor
