"""The core's own implementations of answer hooks, used where no plugin answers; each the simplest correct one.

A default is registered only for hooks that no plugin of the stack answers, so that wrappers have something inside them
and a plugin that returns None can never fall through to a second execution.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from stratagem.api.batches import move_batch
from stratagem.api.markers import hookimpl
from stratagem.api.named_state import logical_optimizer_state, physical_optimizer_state
from stratagem.api.state_fit import load_weights
from stratagem.api.world import Collectives
from stratagem.runtime.data import shard_dataloader


def connect(world: Any, run: Any) -> Collectives:
    if world.world_size == 1:
        return Collectives()
    from stratagem.distributed.process_group import join

    return join(world, run.accelerator.backend, run)


def units() -> list[nn.Module]:
    return []


def wrap_backend(backend: Any) -> Any:
    return backend


def wrap_optimizers(optimizers: Any) -> Any:
    return optimizers


def wrap_dataloader(loader: Any, stage: Any, run: Any) -> Any:
    mesh = run.mesh
    for choice in run.stack.strategies[:-1]:
        mesh = choice.plugin.data_mesh(mesh, stage)
    return shard_dataloader(loader, stage, mesh)


def transfer_batch(batch: Any, run: Any) -> Any:
    if run.custom_transfer is not None:
        return run.custom_transfer(batch)
    if run.copy_stream is not None:
        return run.copy_stream(batch)
    return move_batch(batch, run.device)


def scale_loss(loss: Any) -> Any:
    return loss


def backward(loss: Any, run: Any) -> bool:
    run.differentiate(loss)
    return True


def clip_gradients(optimizer: Any, max_norm: Any, max_value: Any) -> Any:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if max_value is not None:
        if any(parameter.grad is not None for parameter in parameters):  # torch raises an error for none
            nn.utils.clip_grad_value_(parameters, max_value)
        return 0.0
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def step_optimizers(optimizers: Any, closure: Any, run: Any) -> bool:
    stepped = [run.step.step_one(each, closure) for each in optimizers]
    return all(stepped)


def optimizer_step(optimizer: Any, closure: Any) -> bool:
    if closure is None:
        optimizer.step()
    else:
        optimizer.step(closure)
    return True


def model_state(module: Any) -> Any:
    return module.state_dict()


def load_model_state(state: Any, module: Any, strict: Any) -> bool:
    load_weights(module, state, strict)
    return True


def optimizer_state(optimizer: Any, module: Any) -> Any:
    return logical_optimizer_state(optimizer, module)


def load_optimizer_state(state: Any, optimizer: Any, module: Any) -> bool:
    optimizer.load_state_dict(physical_optimizer_state(state, optimizer, module))
    return True


def explain_error(error: Any) -> Any:
    return error


DEFAULTS = {
    function.__name__: function
    for function in (
        connect, units, wrap_backend, wrap_optimizers, wrap_dataloader, transfer_batch, scale_loss, backward,
        clip_gradients, step_optimizers, optimizer_step, model_state, load_model_state, optimizer_state,
        load_optimizer_state, explain_error,
    )
}  # fmt: skip


def plugin_with(hooks: Iterable[str]) -> object:
    """Return a plugin that answers `hooks` with the defaults."""
    body = {name: staticmethod(hookimpl(DEFAULTS[name])) for name in hooks}
    return type("CoreDefaults", (), body)()
