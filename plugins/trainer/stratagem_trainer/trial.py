"""Make optimizer steps for a trial, and restore the state afterwards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api import STEPPED_COPIES
from stratagem.api.parameters import needs_closure
from stratagem.errors import ConfigError
from stratagem.runtime import state_io
from stratagem.stack import identity
from stratagem_trainer.api import mean_loss
from stratagem_trainer.metrics import StageMetrics
from stratagem_trainer.optimizer_modes import set_mode
from stratagem_trainer.progress import Position
from stratagem_trainer.train_step import TrainStep

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState

#: Trains on a batch, with its number; returns the loss, averaged over ranks.
TrialStep = Callable[[Any, int], torch.Tensor]


@contextmanager
def trial_steps(state: FitState, who: str) -> Iterator[TrialStep]:
    """Within: steps may be made; see `Trainer.trial_steps`."""
    _check(state, who)
    module, run, train_batches = state.module, state.run, state.train_batches
    assert train_batches is not None, "a trial is made during a fit"
    mode = state.optimizer_mode
    set_mode(state, "train")
    tensors = [*module.parameters(), *module.buffers()]
    saved = [tensor.detach().clone() for tensor in tensors]
    (optimizer,) = state.run.optimizers
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    keyed = identity.plugins_by_key(run.stack, "state_dict")
    plugins = [(each, copy.deepcopy(each.state_dict())) for key, each in keyed if not key.startswith("callback.")]
    ranks = [{"plugins": state_io.rank_states(run)}] * run.world_size  # each rank reads its part
    random, stage_metrics = train_batches.random_state(), state.stage_metrics
    modes = [(part, part.training) for part in module.modules()]
    state.stage_metrics = StageMetrics(default_on_step=True, collectives=run.readers)
    try:
        yield functools.partial(_step, state, TrainStep(state, Position()))
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer_state)
        for plugin, plugin_state in plugins:
            plugin.load_state_dict(plugin_state)
        state_io.load_rank_states(run, ranks)
        train_batches.restore_random_state(random)
        state.stage_metrics = stage_metrics
        for part, training in modes:
            part.training = training
        set_mode(state, mode)


def _check(state: FitState, who: str) -> None:
    """Refuse what a trial cannot train."""
    optimizers = state.run.optimizers
    evaluates = [type(each).__name__ for each in optimizers if needs_closure(each)]
    if state.run.manual or len(optimizers) != 1 or evaluates:
        raise ConfigError(
            f"{who} found {type(state.module).__name__} with {', '.join(evaluates) or f'{len(optimizers)} optimizers'}"
            + (" and automatic_optimization = False" if state.run.manual else ""),
            expected="one optimizer, stepped by the trainer",
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, torch.optim.Optimizer) or state.run.provides(STEPPED_COPIES):
        raise ConfigError(
            f"{who} cannot restore what {type(optimizer).__name__} steps: "
            f"{state.run.title_of(state.run.strategy)} keeps copies of the weights",
            expected="an optimizer of torch's",
            do='find it with another strategy, such as "ddp"',
        )


def _step(state: FitState, steps: TrainStep, batch: Any, number: int) -> torch.Tensor:
    state.stage_metrics.batch = batch = state.run.transfer(batch)
    outputs = steps.train(batch, number, True)
    loss = mean_loss(outputs, by_count=state.sums_losses)
    if loss is None:
        raise ConfigError(
            f"training_step returned None for batch {number} of a trial", expected="a loss: a trial skips no batch",
            do="remove the callback, or return the loss",
        )  # fmt: skip
    return state.run.collectives.all_reduce(loss.float().clone(), "mean")
