"""Ways to train with less memory that a trainer accepts and does not use yet."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, frozen

from stratagem_callbacks import optimizer_in_backward, optimizer_offload

if TYPE_CHECKING:
    from stratagem_callbacks.memory_held import Held, Memory
    from stratagem_trainer.api import TrainerView

#: Where memory may run out, other than in a call or a method of the module.
BACKWARD, OPTIMIZER_STEP = "backward", "the optimizer step"
_TRAINING = ("fit", "training_step", BACKWARD, OPTIMIZER_STEP)
_MOST = 3
#: What takes less of the memory is not worth a change.
_SHARE = 0.1
_EXPANDABLE = "expandable_segments:True"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@frozen
class Way:
    """Something to change."""

    #: In the imperative.
    text: str
    #: The arguments of the Trainer that it changes.
    arguments: dict[str, Any] = Factory(dict)


def ways_out(trainer: TrainerView, held: Held, memory: Memory, part: str) -> list[Way]:
    """Return up to three ways, the one that saves most first, and a command that tells before a run.

    Args:
        part: where memory ran out: a call of the trainer, a method of the module, `BACKWARD` or `OPTIMIZER_STEP`.
    """
    asked, steps = max(memory.asked, 0), part == OPTIMIZER_STEP  # the first step makes the optimizer's state
    smaller = [*_with_smaller_states(trainer, held, asked if steps else 0)]
    fewer = [*_with_fewer_activations(trainer, trains=part in _TRAINING)]
    sizes = [(held.states + asked * steps, smaller), (held.rest + asked * (not steps), fewer)]
    (largest, first), (other, second) = sorted(sizes, key=lambda size: -size[0])
    ways = [*_with_one_piece(memory), *first, *(second if other >= _SHARE * (largest + other) else ())]
    accepted = list(islice((way for way in ways if _is_open(way, trainer)), _MOST))
    if trainer.run.device.type != "cpu" and importlib.util.find_spec("stratagem_plan") is not None:
        accepted.append(Way("see what fits before a run: `stratagem plan SCRIPT`, `stratagem advise SCRIPT`"))
    return accepted


def _is_open(way: Way, trainer: TrainerView) -> bool:
    """Whether `trainer` accepts `way`, and has not taken it."""
    run = trainer.run
    if way.arguments.get("strategy") == run.name_of(run.strategy):
        return False
    added = way.arguments.get("callbacks", [None])[-1]
    if added in {run.name_of(each) for each in trainer.callbacks}:
        return False
    return not way.arguments or trainer.accepts(**way.arguments)


def _with_one_piece(memory: Memory) -> Iterator[Way]:
    if memory.is_in_pieces and not any(_EXPANDABLE in os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES):
        yield Way(f"set {_ALLOCATOR_VARIABLES[0]}={_EXPANDABLE}: what is free is in pieces")


def _with_fewer_activations(trainer: TrainerView, *, trains: bool) -> Iterator[Way]:
    if not trains:
        yield Way("use smaller batches")
    else:
        is_copied = len(trainer.run.devices) > 1  # in one process: copies would recompute the original
        if not is_copied and _has_blocks(trainer.module) and not _is_recomputed(trainer.module):
            yield Way('set activation_checkpointing="blocks"', {"activation_checkpointing": "blocks"})
        yield from _with_smaller_batches(trainer)
    if trainer.run.policy.compute_dtype in (None, torch.float32):
        yield Way('set precision="bf16-mixed"', {"precision": "bf16-mixed"})


def _with_smaller_batches(trainer: TrainerView) -> Iterator[Way]:
    size, windows = trainer.batch_size, 2 * trainer.accumulate_grad_batches
    divides = next((each for each in trainer.callbacks if trainer.run.name_of(each) == "auto_microbatch"), None)
    if divides is not None and divides.smallest > 1:
        yield Way(f"lower auto_microbatch.smallest, which is {divides.smallest}")
    if size == 1 or divides is not None:
        return
    if trainer.run.manual:
        yield Way("use smaller batches")
        return
    automatic = _callback(trainer, "auto_microbatch")
    also = ' (callbacks="auto_microbatch" does so)' if _is_open(automatic, trainer) else ""
    arguments = {"accumulate_grad_batches": windows}
    if size is not None and size % 2 == 0:
        yield Way(f"use batches of {size // 2} with accumulate_grad_batches={windows}{also}", arguments)
    else:
        yield Way(f"use smaller batches with accumulate_grad_batches{also}", arguments)


def _with_smaller_states(trainer: TrainerView, held: Held, new: int) -> Iterator[Way]:
    """Yield ways to divide, move or shrink parameters, gradients and optimizer state, of which `new` bytes are missing.

    A strategy replaces one with a replica in each process, and not one that was chosen to divide the model.
    """
    run = trainer.run
    name = run.name_of(run.strategy)
    if held.gradients and optimizer_in_backward.fits(trainer):
        yield _callback(trainer, "optimizer_in_backward", ", which frees each gradient in backward")
    if held.optimizer + new and optimizer_offload.fits(trainer):
        yield _callback(trainer, "optimizer_offload", ", which keeps the optimizer's state in the memory of the host")
    if run.world_size == run.mesh.size("data") > 1 and not run.shards_parameters:
        if held.gradients + held.optimizer + new > held.parameters and _steps_all(trainer):
            yield _strategy("ddp_sharded", ", which divides gradients and optimizer state")
        yield _strategy("fsdp", ", which divides parameters, gradients and optimizer state")
    if run.device.type == "cuda":
        if run.world_size == 1 and (count := torch.cuda.device_count()) > 1:
            yield Way(f'use devices={count} with strategy="fsdp"', {"devices": count, "strategy": "fsdp"})
        for offloaded in (f"{name}_cpu_offload", f"{name}_offload"):
            yield _strategy(offloaded, ", which keeps states in the memory of the host")
    if run.policy.param_dtype in (None, torch.float32):
        yield Way('set precision="bf16-true"', {"precision": "bf16-true"})


def _steps_all(trainer: TrainerView) -> bool:
    """Whether each rank steps all parameters, rather than a part of them."""
    groups = [group for optimizer in trainer.run.optimizers for group in optimizer.param_groups]
    stepped = sum(parameter.numel() for group in groups for parameter in group["params"])
    trained = [parameter for parameter in trainer.module.parameters() if parameter.requires_grad]
    return bool(stepped >= sum(parameter.numel() for parameter in trained))


def _strategy(name: str, why: str) -> Way:
    return Way(f'choose strategy="{name}"{why}', {"strategy": name})


def _callback(trainer: TrainerView, name: str, why: str = "") -> Way:
    given = trainer.settings.callbacks
    others = list(given) if isinstance(given, list | tuple) else [given] if given else []
    return Way(f'add callbacks="{name}"{why}', {"callbacks": [*others, name]})


def _has_blocks(module: torch.nn.Module) -> bool:
    from stratagem_transforms.wrap_policy import repeated

    return bool(repeated(module))


def _is_recomputed(module: torch.nn.Module) -> bool:
    from stratagem_transforms.activation_checkpointing import RECOMPUTED

    return any(part.__dict__.get(RECOMPUTED) is not None for part in module.modules())
