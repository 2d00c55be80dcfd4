"""Validate, test and predict: one pass over each loader, without gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_trainer.loader_samplers import set_epoch
from stratagem_trainer.metric_log import log_evaluation_step, publish_epoch, show_epoch
from stratagem_trainer.metrics import StageMetrics
from stratagem_trainer.module import overrides
from stratagem_trainer.signatures import takes

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState

#: What each evaluating stage calls on the module, and the prefix of its events.
_STAGES = {
    "validate": ("validation_step", "on_validation"),
    "test": ("test_step", "on_test"),
    "predict": ("predict_step", "on_predict"),
}


def evaluate(
    state: FitState, stage: str, loaders: list[Any], limits: list[float], keep_predictions: bool = True
) -> list[Any]:
    """Run `stage` over `loaders`; return a dict of metrics (or a list of predictions, if kept) for each loader."""
    run, (method, event) = state.run, _STAGES[stage]
    before = run.stage, state.stage_metrics
    stage_metrics = StageMetrics(default_on_step=False, collectives=run.readers)
    run.stage, state.stage_metrics = stage, stage_metrics
    results: list[Any] = []
    try:
        # Training could not use what is made in inference mode: what a module caches, what a sharded strategy gathers.
        trains = state.fn == "fit" or state.run.shards_parameters
        inference = state.settings.inference_mode and not trains
        with _evaluating(state.module, inference, event):
            stage_metrics.closed = "while predicting" if stage == "predict" else ""
            stage_metrics.without_steps = f"{event}_start"
            state.events.emit(f"{event}_start")
            state.events.emit(f"{event}_epoch_start")
            stage_metrics.without_steps = ""
            listeners = [state.events.listener(f"{event}_batch_{moment}") for moment in ("start", "end")]
            for index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
                stage_metrics.loader = f"/dataloader_idx_{index}" if len(loaders) > 1 else ""
                state.dataloader_idx = index
                call = _step_caller(state, method, index, len(loaders))
                kept = _pass_over(state, stage, loader, limit, index, call, keep_predictions, *listeners)
                results.append(kept)
            stage_metrics.loader, stage_metrics.without_steps = "", f"{event}_epoch_end"
            if stage != "predict":
                if state.events.listener(f"{event}_epoch_end") is not None:
                    show_epoch(state, stage_metrics)
                state.events.emit(f"{event}_epoch_end")
                metrics = publish_epoch(state, stage_metrics)
                results = stage_metrics.by_loader(metrics, len(loaders))
            else:
                state.events.emit(f"{event}_epoch_end")
            stage_metrics.closed = stage_metrics.closed or "after its metrics were reduced"
            if before[0] == "train" and not state.sanity_checking:
                state.position.validated = True  # a run that resumes from here need not do it again
            state.events.emit(f"{event}_end")
    finally:
        stage_metrics.reset()
        run.stage, state.stage_metrics = before
        state.dataloader_idx = 0
    return results


def _pass_over(
    state: FitState, stage: str, loader: Any, limit: float, loader_idx: int, call: Callable[..., Any],
    keep_predictions: bool, batch_start: Any, batch_end: Any,
) -> list[Any]:  # fmt: skip
    run, outputs_kept, batch_idx = state.run, [], -1
    set_epoch(loader, state.position.epoch)
    batches = itertools.islice(loader, None if math.isinf(limit) else int(limit))
    for batch_idx, batch in enumerate(batches):
        moved = run.transfer(batch)
        if run.shards_parameters:
            run.collectives.unchecked.any(True)
        state.stage_metrics.batch = moved
        if batch_start is not None:
            batch_start(batch=moved, batch_idx=batch_idx, dataloader_idx=loader_idx)
        with run.step.evaluate_context(stage):
            outputs = call(moved, batch_idx)
        state.stage_metrics.reduce_step(batch_idx)
        if stage == "predict" and keep_predictions:
            outputs_kept.append(outputs)
        if batch_end is not None:
            batch_end(outputs=outputs, batch=moved, batch_idx=batch_idx, dataloader_idx=loader_idx)
        if stage != "predict":
            state.stage_metrics.reduce_step(batch_idx)  # what hooks logged at the batch's end
            log_evaluation_step(state, stage, loader_idx)
    if run.shards_parameters:
        _join_other_ranks(state, stage, loader_idx, call, moved if batch_idx >= 0 else None, batch_idx)
    if batch_idx < 0 and limit > 0:
        raise ConfigError(f"loader {loader_idx} of {stage} yielded no batch", expected="at least one")
    return outputs_kept


def _join_other_ranks(
    state: FitState, stage: str, loader_idx: int, call: Callable[..., Any], batch: Any, batch_idx: int
) -> None:
    """Repeat the last batch until all ranks are done: their forwards need the shards of this one."""
    run, stage_metrics = state.run, state.stage_metrics
    state.stage_metrics = StageMetrics(default_on_step=False, collectives=run.readers)
    try:
        while run.collectives.unchecked.any(False):
            if batch is None:
                raise ConfigError(
                    f"loader {loader_idx} of {stage} yielded no batch on rank {run.rank}",
                    expected="at least one on every rank",
                )
            state.stage_metrics.batch = batch
            with run.step.evaluate_context(stage):
                call(batch, 0)
            batch_idx += 1
            state.stage_metrics.reduce_step(batch_idx)  # as the ranks that have this batch
    finally:
        state.stage_metrics = stage_metrics


def _step_caller(state: FitState, method: str, loader_idx: int, num_loaders: int) -> Callable[..., Any]:
    """Return a call of the module's `method` with as many of (batch, batch_idx, dataloader_idx) as it takes."""
    function = getattr(state.module, method)
    model = state.run.model
    if takes(function, 3) and (num_loaders > 1 or not takes(function, 2)):
        return lambda batch, batch_idx: model(method, batch, batch_idx, loader_idx)
    if takes(function, 2):
        return lambda batch, batch_idx: model(method, batch, batch_idx)
    return lambda batch, _: model(method, batch)


@contextmanager
def _evaluating(module: nn.Module, inference_mode: bool, event: str) -> Iterator[None]:
    """Switch to evaluation without gradients; afterwards every submodule has the mode that it had before.

    A module's own ``{event}_model_eval`` and ``{event}_model_train`` switch instead.
    """
    modes = [(part, part.training) for part in module.modules()]
    to_eval, to_train = f"{event}_model_eval", f"{event}_model_train"
    switch = getattr(module, to_eval) if overrides(module, to_eval) else module.eval
    switch()
    try:
        with torch.inference_mode() if inference_mode else torch.no_grad():
            yield
    finally:
        if overrides(module, to_train):
            getattr(module, to_train)()
        else:
            for part, training in modes:
                part.training = training
