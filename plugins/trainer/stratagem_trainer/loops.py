"""The training loop: epochs of batches. It calls hooks and `Run`, and depends on no plugin."""

from __future__ import annotations

import contextlib
import math
import operator
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.api.parameters import needs_closure
from stratagem.api.readback import LateFlag
from stratagem.api.run_parts import BATCH, NEXT_BATCH, PHASE, SINCE, STEP, TRAINING_STEP
from stratagem.errors import ConfigError, shown
from stratagem_trainer import fit_state
from stratagem_trainer.batches import ResumableBatches
from stratagem_trainer.custom_step import STEP_METHODS, ClosureStep
from stratagem_trainer.metric_log import end_epoch, log_last_step, log_step
from stratagem_trainer.metrics import StageMetrics
from stratagem_trainer.module import overrides
from stratagem_trainer.optimizer_handle import watched_steps
from stratagem_trainer.optimizer_modes import set_mode
from stratagem_trainer.train_step import TrainStep
from stratagem_trainer.validation_clock import ValidationClock

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState


class TrainLoop:
    """Epochs of batches until a limit is reached."""

    def __init__(
        self, state: FitState, train_batches: ResumableBatches, validate: Callable[[], None],
        reload_loaders: Callable[[], None],
    ) -> None:  # fmt: skip
        self.state, self.validate, self.run, self.train_batches = state, validate, state.run, train_batches
        self.reload_loaders = reload_loaders
        self.settings, self.position = state.settings, state.position
        module = state.module
        self.accumulate = state.accumulate_grad_batches
        own = any(overrides(module, method) for method in STEP_METHODS)
        several = len(self.run.optimizers) != 1
        closes = not (self.run.manual or several) and (own or needs_closure(self.run.optimizers[0]))
        self.step = (ClosureStep if closes else TrainStep)(state, self.position)
        self._check_optimizers()
        #: The module has ended this epoch before its last batch.
        self.skips_rest = False
        #: The latest epoch that it ended before its first batch.
        self.skipped_epoch: int | None = None
        #: All ranks have reached the point where training is to stop.
        self.told_to_stop = False
        #: Batches between two validations; None validates at the end of an epoch of unknown length.
        self.validate_every: float | None = None
        #: Batches of earlier epochs that count for it.
        self.batches_before = 0
        self.batch_start = state.events.listener("on_train_batch_start")
        #: Whether the module defines on_train_batch_start, which may end the epoch; plugins cannot.
        self.module_may_skip = overrides(module, "on_train_batch_start")
        self.batch_end = state.events.listener("on_train_batch_end")
        self.step.listen(train_batches.targets)
        self.step_schedulers: list[Any] = []
        self.deadline = None if state.max_time is None else time.monotonic() + state.max_time.total_seconds()
        #: Says when to validate, for a `val_check_interval` in time.
        self.clock = ValidationClock(state) if state.validates_in_time and any(state.num_val_batches) else None
        self._over = None if self.deadline is None else LateFlag(self.run.collectives.duplicate("flags"))

    def _check_optimizers(self) -> None:
        module, optimizers, settings = self.state.module, self.run.optimizers, self.settings
        name, evaluates = type(module).__name__, [type(each).__name__ for each in optimizers if needs_closure(each)]
        own = [f"{name}.{method}" for method in STEP_METHODS if overrides(module, method)]
        for option, unset in {"gradient_clip_val": (None, 0), "loss_normalization": ("batches",)}.items():
            if self.run.manual and (value := getattr(settings, option)) not in unset:
                raise self._by_hand(f"{option} is {value!r}")
        if not self.run.manual and len(optimizers) > 1 and (evaluates or own):
            raise ConfigError(
                f"{name}.configure_optimizers returned {len(optimizers)} optimizers with " + (evaluates or own)[0],
                expected="one optimizer, or several that the trainer steps after each backward",
                do="set automatic_optimization = False and step them in training_step",
            )
        if evaluates and settings.loss_normalization != "batches":
            raise ConfigError(
                f"loss_normalization is {settings.loss_normalization!r} with {evaluates[0]}, which evaluates the model "
                "itself", expected='"batches"',
            )  # fmt: skip
        if settings.accumulate_grad_batches != 1:
            self._check_accumulation(settings.accumulate_grad_batches)

    def _check_accumulation(self, batches: int | dict[int, int]) -> None:
        """Refuse to accumulate where `training_step` steps, or for an optimizer that evaluates one batch many times."""
        if self.run.manual:
            raise self._by_hand(f"accumulate_grad_batches is {batches}")
        if self.step.closes_over:
            by = f"{type(self.run.optimizers[0]).__name__}, which evaluates the model itself"
            raise ConfigError(f"accumulate_grad_batches is {batches} with {by}", expected="1")

    def _by_hand(self, found: str) -> ConfigError:
        found += f" with {type(self.state.module).__name__}.automatic_optimization = False"
        return ConfigError(found, expected="it unset", do="do it in training_step, where you step the optimizers")

    def fit(self) -> None:
        """Train from the current position until a limit."""
        state, position = self.state, self.position
        if position.epoch_ended:
            self._begin(position.epoch + 1)
        state.stage_metrics.closed = ""
        set_mode(state, "train")
        state.events.emit("on_train_start")
        for optimizer in self.run.optimizers:
            optimizer.zero_grad()  # gradients that an earlier fit left in an open window are computed again
        self.train_batches.start(position)
        watches = self.run.manual or isinstance(self.step, ClosureStep)  # the module steps, or may
        with watched_steps(state, counts=self.run.manual) if watches else contextlib.nullcontext():
            while not self._finished():
                self._epoch()
                if not position.epoch_ended:
                    break  # stopped in the middle
                self._begin(position.epoch + 1)
        log_last_step(state)
        state.outcome.reason = self._why_ended()
        state.stage_metrics.closed = "after the last epoch"
        set_mode(state, "eval")
        state.events.emit("on_train_end")
        state.last_outputs = None  # it holds the last graph

    def _begin(self, epoch: int) -> None:
        position = self.position
        position.batches_of_earlier_epochs += position.batches_done
        position.epoch, position.batches_done, position.epoch_random_state = epoch, 0, None
        position.epoch_done, position.epoch_ended, position.validated = False, False, True
        self.state.trains_last_batch = False

    def _finished(self) -> bool:
        position, settings = self.position, self.settings
        if settings.max_epochs is not None and 0 <= settings.max_epochs <= position.epoch:
            return True
        return self._out_of_steps() or (self._trained_enough() and (self._is_told_to_stop() or self._out_of_time()))

    def _trained_enough(self) -> bool:
        position, settings = self.position, self.settings
        return position.epoch >= (settings.min_epochs or 0) and position.global_step >= (settings.min_steps or 0)

    def _out_of_steps(self) -> bool:
        return 0 <= self.settings.max_steps <= self.position.global_step

    def _out_of_time(self) -> bool:
        """Whether max_time was over on some rank at the last call: no step waits for a message."""
        if self.deadline is None or self._over is None:
            return False
        return not self.state.max_time or self._over.exchange(time.monotonic() >= self.deadline)

    def _why_ended(self) -> str:
        """Return the limit that ended training, or the reason of what has set should_stop."""
        settings = self.settings
        if self._out_of_steps():
            return f"max_steps={settings.max_steps} is reached"
        if settings.max_epochs is not None and 0 <= settings.max_epochs <= self.position.epoch:
            return f"max_epochs={settings.max_epochs} is reached"
        return self.state.outcome.reason or f"max_time={shown(settings.max_time)} is over"

    def _epoch(self) -> None:
        state, position = self.state, self.position
        self.accumulate = state.accumulate_grad_batches
        if self.accumulate != 1:
            self._check_accumulation(self.accumulate)  # a callback may have scheduled it
        self.reload_loaders()
        if position.batches_done == 0:
            state.events.emit("on_train_epoch_start")
            self.reload_loaders()  # data sets and samplers may have been changed
        self.step_schedulers = [config for config in state.lr_scheduler_configs if config.interval == "step"]
        between = state.batches_between_validations
        self.validate_every = None if math.isinf(between) else between
        counts_all = self.settings.check_val_every_n_epoch is None
        self.batches_before = position.batches_of_earlier_epochs if counts_all else 0
        if position.batches_done and position.batches_done >= self.train_batches.num_batches:
            self._end_longer_epoch()  # an epoch had more batches in the run that is resumed
        if not position.validated:
            self._validate()  # the resumed run was stopped before it
            self.train_batches.commit_position()
        self.skips_rest = False
        start, skipped = position.batches_done, self.run.step.skipped_batches
        batches = () if position.epoch_done else self.train_batches.epoch(position, self.accumulate)
        for batch_idx, batch, is_last, window_size in batches:
            self.step.divisor = self._divisor(window_size)
            if batch_idx < self.train_batches.replay_until:
                self._replay(batch, batch_idx)
                continue
            self._batch(batch, batch_idx, is_last)
            if self.clock is not None:
                position.validated = not self.clock.exchange(position.epoch)
            if self.skips_rest:
                break
            if state.on_leaving:
                state.leave_if_asked()
            validates = not position.validated
            if validates:
                self._validate()
            if self._out_of_steps():
                break
            may_end = state.should_stop or self.deadline is not None
            if may_end and self._trained_enough() and (self._is_told_to_stop() or self._out_of_time()):
                if not (validates or position.epoch_done):
                    self._validate()  # so that checkpoints and callbacks see metrics of this point
                break
        if position.batches_done == start and start and not position.epoch_done:
            self._end_longer_epoch()
        if start == 0 and position.batches_done and self.run.step.skipped_batches - skipped == position.batches_done:
            raise ConfigError(
                f"training_step returned None for all {position.batches_done} batches of epoch {position.epoch}",
                expected="a loss for some: nothing was trained", do="end training_step with `return loss`",
            )  # fmt: skip
        if position.batches_done == 0 and not self.skips_rest:
            raise ConfigError("the training loader yielded no batch", expected="at least one", do="check its data set")
        if position.batches_done == 0:
            self._check_skipped()
        if position.epoch_done or position.batches_done > start:
            end_epoch(state, complete=position.epoch_done)

    def _divisor(self, window_size: int) -> float:
        """Return what the loss of the next batch is divided by, in a window of `window_size` batches."""
        if self.train_batches.targets is not None:
            return self.train_batches.targets.divisor()
        if self.position.loss_divisor:
            return self.position.loss_divisor
        return window_size if self.settings.average_short_window else self.accumulate

    def _end_longer_epoch(self) -> None:
        position, now = self.position, self.train_batches.num_batches
        if not position.epoch_done and position.batches_done != now and self.run.is_global_zero:
            warnings.warn(
                f"the checkpoint was saved after {position.batches_done} batches of epoch {position.epoch}, and "
                + ("the loader has fewer now" if math.isinf(now) else f"an epoch has {int(now)} now")
                + ": the rest of that epoch is left out",
                stacklevel=2,
            )
        position.epoch_done = True

    def _is_told_to_stop(self) -> bool:
        """Whether a callback or the module has set should_stop. If only some ranks have, all raise an error."""
        state, run = self.state, self.run
        if state.should_stop and run.world_size > 1 and not self.told_to_stop:
            run.collectives.barrier_with_timeout("trainer.should_stop = True", fit_state.BARRIER_TIMEOUT_S)
            self.told_to_stop = True
        return state.should_stop

    def _validate(self) -> None:
        self.validate()
        self.position.validated = True
        if self.clock is not None:
            self.clock.restart()

    def _replay(self, batch: Any, batch_idx: int) -> None:
        """Compute the gradients of a batch again that the resumed run had used, in a window that was still open."""
        state, run = self.state, self.run
        stage_metrics = state.stage_metrics
        state.stage_metrics = StageMetrics(default_on_step=True, collectives=run.readers)
        try:
            state.stage_metrics.batch = batch = run.hooks.transfer_batch(batch=batch, run=run)
            if self.batch_start is not None:
                self.batch_start(batch=batch, batch_idx=batch_idx)  # it may change the batch
            self.step.gradients(batch, batch_idx, False)
        finally:
            state.stage_metrics = stage_metrics

    def _batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        state, run = self.state, self.run
        state.trains_last_batch = is_last
        if self.step.uneven is not None:
            self.step.uneven = self.step.uneven.see(batch)
        batch = run.hooks.transfer_batch(batch=batch, run=run)
        state.stage_metrics.batch = batch
        run.activity[STEP], run.activity[BATCH], run.activity[SINCE] = self.position.global_step, batch_idx, time.time()
        run.activity[PHASE] = TRAINING_STEP
        if self.batch_start is not None:
            answer = self.batch_start(batch=batch, batch_idx=batch_idx)
            if answer is not None and self.module_may_skip:
                self._check_answer(answer, batch_idx)
                self._skip_rest(batch_idx)
                return
        position, sync = self.position, is_last or (batch_idx + 1) % self.accumulate == 0
        outputs = state.last_outputs = self.step.train(batch, batch_idx, sync)
        if closes := bool(sync and self.step.optimizers):
            self.train_batches.close_window()
            self.count_step(self.step.stepped)
        position.batches_done, position.epoch_done = batch_idx + 1, is_last
        every = self.validate_every
        count = self.batches_before + batch_idx + 1
        position.validated = not (is_last if every is None else count % every == 0)
        if state.stage_metrics.metrics:
            state.stage_metrics.reduce_step(batch_idx)
            state.published.update(state.stage_metrics.callback_values())
        if closes and self.step_schedulers:
            self._step_schedulers()  # one may step by what the batch has logged
        run.activity[SINCE], run.activity[PHASE] = time.time(), NEXT_BATCH
        if self.batch_end is not None:
            self.batch_end(outputs=outputs, batch=batch, batch_idx=batch_idx)
        if state.stage_metrics.metrics:
            log_step(state, self._out_of_steps() or (is_last and position.epoch + 1 == self.settings.max_epochs))

    @staticmethod
    def _check_answer(answer: Any, batch_idx: int) -> None:
        try:
            is_meant = not isinstance(answer, bool) and operator.index(answer) == -1
        except TypeError:
            is_meant = False
        if not is_meant:
            raise ConfigError(
                f"on_train_batch_start returned {answer!r} at batch {batch_idx}",
                expected="None, or -1 to skip the rest of the epoch", do="return nothing to train the batch",
            )  # fmt: skip

    def _check_skipped(self) -> None:
        """Warn of the first epoch that was skipped as a whole; refuse to skip one after another without an end."""
        epoch, limit = self.position.epoch, self.settings.max_epochs
        if self.skipped_epoch is None and self.run.is_global_zero:
            warnings.warn(
                f"on_train_batch_start returned -1 at the first batch of epoch {epoch}: nothing was trained in it",
                stacklevel=2,
            )
        if self.skipped_epoch == epoch - 1 and (limit is None or limit < 0):
            raise ConfigError(
                f"on_train_batch_start returned -1 at the first batch of epochs {epoch - 1} and {epoch}, "
                "and max_epochs sets no limit",
                expected="a batch that is trained, or training would never end",
                do="return None there, or set max_epochs",
            )
        self.skipped_epoch = epoch

    def _skip_rest(self, batch_idx: int) -> None:
        """End the epoch before batch `batch_idx`, as the module asked. If only some ranks do so, all raise an error."""
        if self.run.world_size > 1:
            try:
                self.run.collectives.barrier_with_timeout("on_train_batch_start", fit_state.BARRIER_TIMEOUT_S)
            except ConfigError:
                raise ConfigError(
                    f"on_train_batch_start returned -1 at batch {batch_idx} on rank {self.run.rank}, not on all ranks",
                    expected="the same answer on every rank",
                    do="decide by what all ranks know, or all-reduce it first",
                ) from None
        for optimizer in self.run.optimizers:
            optimizer.zero_grad()  # those of an open window
        self.step.sums.forget()
        self.train_batches.close_window()
        position = self.position
        position.batches_done, position.epoch_done, self.skips_rest = batch_idx, True, True

    def count_step(self, stepped: bool) -> None:
        """Count an optimizer step."""
        self.position.global_step += 1
        self.position.skipped_steps += not (stepped or self.step.dropped)

    def _step_schedulers(self) -> None:
        """Step the schedulers that are due, unless the optimizer step was skipped."""
        if not self.step.stepped:
            return
        for config in self.step_schedulers:
            if self.position.global_step % config.frequency == 0:
                config.step(self.state)
