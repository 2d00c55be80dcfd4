"""The training loop: epochs of batches. It calls hooks and `Run`, and depends on no plugin."""

from __future__ import annotations

import contextlib
import math
import operator
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.late_flag import LateFlag
from stratagem.api.parameters import needs_closure
from stratagem.errors import ConfigError, shown
from stratagem_trainer import fit_state
from stratagem_trainer.batches import ResumableBatches
from stratagem_trainer.custom_step import STEP_METHODS, ClosureStep, clip_together, clipping
from stratagem_trainer.metric_log import end_epoch, log_last_step, log_step
from stratagem_trainer.metrics import StageMetrics
from stratagem_trainer.module import overrides
from stratagem_trainer.optimizer_handle import watched_steps
from stratagem_trainer.optimizer_modes import set_mode
from stratagem_trainer.signatures import takes
from stratagem_trainer.token_loss import SummedLosses, UnevenTargets
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
        #: Divides the loss of a batch: the number of batches of its accumulation window, or see `token_loss`.
        self.divisor: float = 1
        self.sums = SummedLosses(self.run, self.position, fit_state.BARRIER_TIMEOUT_S)
        self.uneven = self._uneven_targets()
        self.with_index = takes(module.training_step, 2)
        self.optimizer = self.run.optimizers[0] if len(self.run.optimizers) == 1 else None
        self.closes_over = not self.run.manual and self.optimizer is not None and needs_closure(self.optimizer)
        self._check_optimizers()
        #: Clips an optimizer's gradients before its step; None does not.
        self.clip = clipping(state)
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
        self.before_step = state.events.listener("on_before_optimizer_step")
        self.before_zero_grad = state.events.listener("on_before_zero_grad")
        #: Trains a batch, and steps.
        self.train = self._training()
        self._listen_to_backward()
        self.step_schedulers = [config for config in state.lr_scheduler_configs if config.interval == "step"]
        self.deadline = None if state.max_time is None else time.monotonic() + state.max_time.total_seconds()
        #: Says when to validate, for a `val_check_interval` in time.
        self.clock = ValidationClock(state) if state.validates_in_time and any(state.num_val_batches) else None
        self._over = None if self.deadline is None else LateFlag(self.run.collectives.duplicate("flags"))

    def _training(self) -> Callable[[Any, int, bool], Any]:
        if self.run.manual:
            return self._train_by_hand
        wanted = self.closes_over or any(overrides(self.state.module, method) for method in STEP_METHODS)
        if self.optimizer is None and self.run.optimizers:
            return self._train_several
        return ClosureStep(self, self.optimizer) if wanted and self.optimizer is not None else self._train

    def _listen_to_backward(self) -> None:
        """Have the run emit the events of each backward, wherever it is called."""
        emit, targets = self.state.events.listener("on_before_backward"), self.train_batches.targets
        closure = self.train if isinstance(self.train, ClosureStep) else None

        def before_backward(loss: torch.Tensor) -> None:
            if targets is not None and math.isinf(self.divisor):
                targets.check_mean(loss, self.position.batches_done)
            if closure is not None:
                closure.zero_if_due()
            if emit is not None:
                emit(loss=loss)

        listens = closure is not None or emit is not None or targets is not None
        self.run.step.before_backward = before_backward if listens else None
        self.run.step.after_backward = self.state.events.listener("on_after_backward")

    def _check_optimizers(self) -> None:
        manual, count = self.run.manual, len(self.run.optimizers)
        name = type(self.state.module).__name__
        evaluates = [type(each).__name__ for each in self.run.optimizers if needs_closure(each)]
        own = [f"{name}.{method}" for method in STEP_METHODS if overrides(self.state.module, method)]
        if not manual and count > 1 and (evaluates or own):
            raise ConfigError(
                f"{name}.configure_optimizers returned {count} optimizers with {(evaluates or own)[0]}",
                expected="one optimizer, or several that the trainer steps after each backward",
                do="set automatic_optimization = False and step them in training_step",
            )
        if self.closes_over and self.settings.loss_normalization != "batches":
            raise ConfigError(
                f"loss_normalization is {self.settings.loss_normalization!r} with {type(self.optimizer).__name__}, "
                "which evaluates the model itself", expected='"batches"',
            )  # fmt: skip
        accumulates = self.settings.accumulate_grad_batches != 1
        if accumulates:
            self._check_accumulation(self.settings.accumulate_grad_batches)
        refused = {
            "accumulate_grad_batches": accumulates, "gradient_clip_val": self.settings.gradient_clip_val,
            "loss_normalization": self.settings.loss_normalization != "batches",
        }  # fmt: skip
        for option, is_set in refused.items():
            if manual and is_set:
                raise ConfigError(
                    f"{option} is {getattr(self.settings, option)!r} with {name}.automatic_optimization = False",
                    expected="it unset",
                    do="do it in training_step, where you step the optimizers",
                )

    def _check_accumulation(self, batches: int | dict[int, int]) -> None:
        """Refuse to accumulate for an optimizer that evaluates one batch many times."""
        if self.closes_over:
            raise ConfigError(
                f"accumulate_grad_batches is {batches} with {type(self.optimizer).__name__}, which evaluates the model "
                "itself", expected="1",
            )  # fmt: skip

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
        watches = self.train not in (self._train, self._train_several)  # the module steps, or may
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
            self.divisor = self._divisor(window_size)
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

    def _uneven_targets(self) -> UnevenTargets | None:
        run, settings = self.run, self.settings
        several = settings.accumulate_grad_batches != 1 or run.mesh.num_data_shards > 1
        asked = "loss_normalization" in settings.origins or run.manual
        return UnevenTargets() if several and not asked and run.is_global_zero else None

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
            self.forward_backward(batch, batch_idx, False)
        finally:
            state.stage_metrics = stage_metrics

    def _batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        state, run = self.state, self.run
        state.trains_last_batch = is_last
        if self.uneven is not None:
            self.uneven = self.uneven.see(batch)
        batch = run.hooks.transfer_batch(batch=batch, run=run)
        state.stage_metrics.batch = batch
        if self.batch_start is not None:
            answer = self.batch_start(batch=batch, batch_idx=batch_idx)
            if answer is not None and self.module_may_skip:
                self._check_answer(answer, batch_idx)
                self._skip_rest(batch_idx)
                return
        outputs = self.train(batch, batch_idx, is_last or (batch_idx + 1) % self.accumulate == 0)
        state.last_outputs = outputs
        position = self.position
        position.batches_done, position.epoch_done = batch_idx + 1, is_last
        every = self.validate_every
        count = self.batches_before + batch_idx + 1
        position.validated = not (is_last if every is None else count % every == 0)
        if state.stage_metrics.metrics:
            state.stage_metrics.reduce_step(batch_idx)
            state.callback_metrics.update(state.stage_metrics.step_values())
        if self.batch_end is not None:
            self.batch_end(outputs=outputs, batch=batch, batch_idx=batch_idx)
        if state.stage_metrics.metrics:
            log_step(state, self._out_of_steps() or (is_last and position.epoch + 1 == self.settings.max_epochs))

    def forward_backward(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Add the gradients of `batch`, the last one of its window if `sync`; return what `training_step` returned."""
        if (train := self.state.train_batch) is not None:
            outputs = train(batch, batch_idx, self.divisor, sync)
        else:
            outputs = self.run.step.train_step(batch, batch_idx, self.divisor, sync, self.with_index)
        if isinstance(outputs, dict) and "count" in outputs:
            self._count(outputs["count"])
        elif self.sums.are_known and outputs is not None:
            self.sums.refuse_uncounted()
        if sync and self.sums.are_known:
            self.sums.correct(self.run.optimizers, self.divisor)
        return outputs

    def _count(self, count: Any) -> None:
        """Add the `count` that `training_step` returned, unless a chosen `loss_normalization` says how losses count."""
        chosen = self.settings.loss_normalization
        if self.train_batches.targets is not None or self.closes_over:
            by = f"loss_normalization={chosen!r}" if chosen != "batches" else type(self.optimizer).__name__
            raise ConfigError(
                f"training_step returned a 'count' under {by}", expected="a loss that is a mean, without it",
                do="divide the loss by it",
            )  # fmt: skip
        if self.state.sums_losses:
            self.uneven = None
            self.sums.add(count)

    def _train(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Train `batch`, and step if it ends its window (`sync`); return what `training_step` returned."""
        run, optimizer = self.run, self.optimizer
        outputs = self.forward_backward(batch, batch_idx, sync)
        if not sync or optimizer is None:
            return outputs
        if self.before_step is not None:
            self.before_step(optimizer=optimizer)
        if self.clip is not None:
            self.clip(optimizer)
        stepped = run.step.optimizer_step(optimizer)
        if self.before_zero_grad is not None:
            self.before_zero_grad(optimizer=optimizer)
        optimizer.zero_grad()
        self.train_batches.close_window()
        self.count_step(stepped)
        return outputs

    def _train_several(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """As `_train`: all optimizers step after the backward that ends a window, which counts as one step."""
        run, optimizers = self.run, self.run.optimizers
        outputs = self.forward_backward(batch, batch_idx, sync)
        if not sync:
            return outputs
        if self.before_step is not None:
            for optimizer in optimizers:
                self.before_step(optimizer=optimizer)
        if self.clip is not None:
            clip_together(self.state, self.clip)
        stepped = [run.step.optimizer_step(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            if self.before_zero_grad is not None:
                self.before_zero_grad(optimizer=optimizer)
            optimizer.zero_grad()
        self.train_batches.close_window()
        self.count_step(all(stepped))
        return outputs

    def _train_by_hand(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Call `training_step`, which steps the optimizers."""
        return self.run.step.train_step(batch, batch_idx, 1, True, self.with_index)

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
        self.sums.forget()
        self.train_batches.close_window()
        position = self.position
        position.batches_done, position.epoch_done, self.skips_rest = batch_idx, True, True

    def count_step(self, stepped: bool) -> None:
        """Count an optimizer step, and step the schedulers unless a loss scale skipped it."""
        self.position.global_step += 1
        if not stepped:
            self.position.skipped_steps += 1
            return
        for config in self.step_schedulers:
            if self.position.global_step % config.frequency == 0:
                config.step(self.state)
