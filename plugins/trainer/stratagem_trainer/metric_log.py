"""Record what a module logs, and publish it: to callbacks, the progress bar and the loggers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stratagem.api.readback import as_numbers
from stratagem.api.world import Collectives
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, nearest
from stratagem_trainer.metrics import LogOptions, StageMetrics

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState

F = TypeVar("F", bound=Callable[..., None])


def refuse_unknown_options(log: F) -> F:
    """Let `log`, a method whose options are keywords, refuse one that it does not have."""
    parameters = inspect.signature(log).parameters
    known = [parameter.name for parameter in parameters.values() if parameter.default is not parameter.empty]

    @functools.wraps(log)
    def wrapper(self: Any, *values: Any, **options: Any) -> None:
        try:
            log(self, *values, **options)
        except TypeError as error:
            unknown = next((option for option in options if option not in parameters), None)
            if unknown is None:
                raise
            metric = next((repr(value) for value in values if isinstance(value, str)), "")
            do = moved_names("log_options").get(unknown) or nearest(unknown, known)
            options_known = f"options {', '.join(known)}"
            raise ConfigError(f"{log.__name__}({metric}) got {unknown}", expected=options_known, do=do) from error

    return cast(F, wrapper)


def log_metric(
    state: FitState, name: str, value: Any, options: LogOptions, batch_size: int | None, add_dataloader_idx: bool
) -> None:
    """Record what `Module.log` got."""
    if options.rank_zero_only and not state.run.is_global_zero:
        return
    stage_metrics = state.stage_metrics
    if stage_metrics.closed:
        stage_metrics = _metrics_for_one(state, name)
    stage_metrics.log(name, value, options, batch_size, add_dataloader_idx)
    if stage_metrics is not state.stage_metrics:
        _publish_late(state, name, stage_metrics)


def _metrics_for_one(state: FitState, name: str) -> StageMetrics:
    """Return metrics for what a callback logs after those of the epoch were reduced; elsewhere it is too late."""
    if state.late_metrics is None:
        raise ConfigError(
            f"log({name!r}) was called {state.stage_metrics.closed}",
            expected="a call while metrics are collected: from the start of training, of a validation or of a test "
            "until its metrics are reduced",
            do="log it in a step or in an epoch's end, or pass it to self.logger",
        )  # fmt: skip
    if name in state.late_metrics:
        raise ConfigError(
            f"log({name!r}) was called twice in on_train_epoch_end", expected="one value", do="use two names"
        )
    stage_metrics = StageMetrics(default_on_step=False, collectives=state.run.readers)
    stage_metrics.without_steps = "on_train_epoch_end"
    return stage_metrics


def _publish_late(state: FitState, name: str, stage_metrics: StageMetrics) -> None:
    (metric,) = stage_metrics.metrics.values()
    if not metric.on_epoch:
        raise ConfigError(
            f"log({name!r}, on_epoch=False) was called in on_train_epoch_end", expected="on_epoch=True",
            do="drop on_epoch",
        )  # fmt: skip
    if not metric.sync_dist:
        stage_metrics.collectives = Collectives()  # one rank may log alone
    assert state.late_metrics is not None
    values = stage_metrics.epoch_values()
    state.published.update(values)
    state.published.bar.update(values if metric.prog_bar else {})
    state.late_metrics[name] = values[name] if metric.logger else None


def log_step(state: FitState, is_last: bool) -> None:
    """After a training batch that has metrics: hand those of the step to the loggers when it is their turn.

    Args:
        is_last: a limit ends training after this batch. Its metrics must be in the checkpoint that is saved then.
    """
    position = state.position
    step = position.global_step
    state.stage_metrics.reduce_step(position.batches_done)  # what hooks logged at the batch's end
    is_first = state.last_logged_step < 0
    due = is_first or is_last or step % state.settings.log_every_n_steps == 0
    if due and step != state.last_logged_step and step:
        state.last_logged_step = step
        _to_loggers(state, _for_loggers(state.stage_metrics, state.stage_metrics.step_values()))


def _for_loggers(stage_metrics: StageMetrics, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of `values` that were logged with ``logger=True``."""
    return {name: value for name, value in values.items() if stage_metrics.shown(name, "logger")}


def log_last_step(state: FitState) -> None:
    """After training that something else than a limit ended: hand the metrics of its last step to the loggers."""
    if state.last_logged_step not in (-1, state.position.global_step):
        epoch, values = state.last_step
        _to_loggers(state, values, epoch=epoch)


def log_evaluation_step(state: FitState, stage: str, loader_idx: int) -> None:
    """After a batch of validation or testing: hand what its step logged to the loggers.

    The step axis counts the batches of this loader, over all evaluations of the run.
    """
    if state.sanity_checking:
        return
    batches = state.position.evaluated_batches
    key = f"{stage}.{loader_idx}"
    batches[key] = batches.get(key, 0) + 1
    stage_metrics = state.stage_metrics
    if stage_metrics.logs_steps:
        steps = stage_metrics.step_values(stage_metrics.loader)
        _to_loggers(state, _for_loggers(stage_metrics, steps), batches[key])


def show_epoch(state: FitState, stage_metrics: StageMetrics) -> dict[str, Any]:
    """Reduce `stage_metrics` over the epoch so far (collective), let callbacks read the values, and return them."""
    values = stage_metrics.epoch_values()
    state.published.update(stage_metrics.step_values())
    state.published.update(values)
    state.published.update({stage_metrics.name(name): value for name, value in values.items()})
    return values


def publish_epoch(state: FitState, stage_metrics: StageMetrics) -> dict[str, Any]:
    """Reduce `stage_metrics` over the epoch (collective), publish the values, and return them."""
    values = show_epoch(state, stage_metrics)
    for name, value in values.items():
        if stage_metrics.shown(name, "prog_bar"):
            state.published.bar[name] = value
    if not state.sanity_checking:
        _to_loggers(state, _for_loggers(stage_metrics, values))
    return values


def end_epoch(state: FitState, complete: bool = True) -> None:
    """Reduce the epoch's metrics, step the schedulers, call the callbacks.

    An epoch that is not `complete` was cut short: callbacks see its end, and resuming trains the rest of it, so neither
    schedulers nor the position move on.
    """
    stage_metrics = state.stage_metrics
    state.last_step = state.position.epoch, _for_loggers(stage_metrics, stage_metrics.step_values())
    stage_metrics.default_on_step, stage_metrics.without_steps = False, "on_train_epoch_end"

    def publish() -> None:
        publish_epoch(state, stage_metrics)
        # What `lr_scheduler_step` logs is late, too.
        state.late_metrics, stage_metrics.closed = {}, "in on_train_epoch_end"
        if complete:
            _step_epoch_schedulers(state)
            state.position.epoch_ended = True

    state.events.module_first("on_train_epoch_end", before=lambda: show_epoch(state, stage_metrics), then=publish)
    late, state.late_metrics = state.late_metrics or {}, None
    _to_loggers(state, late)
    stage_metrics.default_on_step, stage_metrics.without_steps, stage_metrics.closed = True, "", ""
    if complete:
        stage_metrics.reset()


def _step_epoch_schedulers(state: FitState) -> None:
    for config in () if state.run.manual else state.lr_scheduler_configs:  # by hand means these, too
        if config.interval == "epoch" and (state.position.epoch + 1) % config.frequency == 0:
            config.step(state)


def _to_loggers(
    state: FitState, values: dict[str, Any], step: int | None = None, epoch: int | None = None
) -> None:  # fmt: skip
    values = {name: value for name, value in values.items() if value is not None}
    state.logged.update(values)
    if not values or not state.run.is_global_zero or state.run.hooks.implemented("log_metrics") is None:
        return
    numbers = as_numbers(values)
    step = state.position.global_step if step is None else step
    epoch = state.position.epoch if epoch is None else epoch
    state.run.log_metrics({"epoch": epoch, **numbers}, step)
