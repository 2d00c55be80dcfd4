"""`View`: what callbacks, loggers and modules read of a trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.api.capabilities import ACCUMULATION, STEPS_IN_BACKWARD
from stratagem.api.paths import as_path
from stratagem.api.readback import as_numbers
from stratagem.checkpoint.tensor_memory import collecting
from stratagem.errors import ConfigError
from stratagem_trainer import fit_state
from stratagem_trainer.api import SavedCheckpoint, has_role, mean_loss
from stratagem_trainer.api.validators import read_accumulation
from stratagem_trainer.call_view import CallView
from stratagem_trainer.metric_log import log_metric, refuse_unknown_options
from stratagem_trainer.metrics import LogOptions
from stratagem_trainer.optimizer_modes import in_mode
from stratagem_trainer.part_steps import PartSteps

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig
    from stratagem_trainer.api.metric_values import ReduceFx
    from stratagem_trainer.api.user_view import UserView
    from stratagem_trainer.trial import TrialStep


def _of_state(name: str) -> Any:
    """Return a property that is the attribute `name` of the `FitState`."""

    def get(view: View) -> Any:
        return getattr(view._state, name)

    def put(view: View, value: Any) -> None:
        setattr(view._state, name, value)

    return property(get, put)


def _shown(name: str) -> Any:
    """Return a property: the metrics of that `name` of the `FitState`, as users read them."""
    return property(lambda view: getattr(view._state, name).shown)


class View(CallView):
    """See `stratagem_trainer.api.user_view.UserView`."""

    module, datamodule = _of_state("module"), _of_state("datamodule")
    published, callback_metrics, logged_metrics = _of_state("published"), _shown("published"), _shown("logged")
    position = _of_state("position")
    sanity_checking, fitting = _of_state("sanity_checking"), _of_state("fitting")
    outcome = _of_state("outcome")
    batch_size, num_training_batches = _of_state("batch_size"), _of_state("num_training_batches")
    num_val_batches, num_test_batches = _of_state("num_val_batches"), _of_state("num_test_batches")
    num_predict_batches = _of_state("num_predict_batches")

    # --- This process ----------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return self.run.place.rank == 0

    @property
    def global_rank(self) -> int:
        return self.run.place.rank

    @property
    def local_rank(self) -> int:
        return self.run.place.local_rank

    @property
    def node_rank(self) -> int:
        return self.run.place.node_rank

    @property
    def world_size(self) -> int:
        """Processes of the run: those that take part now, or that a launch would start."""
        return self.run.world_size if self.run.world else self.run.num_processes * self.run.stack.num_nodes

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 only."""
        self.run.print(*values, **options)

    # --- Plugins ---------------------------------------------------------------------------------------------------

    @property
    def callbacks(self) -> tuple[Any, ...]:
        return tuple(choice.plugin for choice in self.run.stack.callbacks)

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that keeps checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that keep checkpoints: those with a `best_model_path`."""
        return [callback for callback in self.callbacks if has_role(callback, "best-checkpoint")]

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback that stops training early, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that stop training early: those with a `stopped_epoch`."""
        return [callback for callback in self.callbacks if has_role(callback, "early-stopping")]

    @property
    def loggers(self) -> list[Any]:
        return [choice.plugin for choice in self.run.stack.loggers]

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return next(iter(self.loggers), None)

    @property
    def strategy(self) -> Any:
        """The strategy that answers hooks: the innermost one."""
        return self.run.stack.strategy

    @property
    def precision(self) -> Any:
        return self.run.stack.precision.plugin

    # --- Progress --------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch being trained, from 0; after training, the number of epochs trained."""
        return self._state.position.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self._state.position.global_step

    @property
    def max_epochs(self) -> int:
        assert self.settings.max_epochs is not None
        return self.settings.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int) -> None:
        self.settings.max_epochs = value

    @property
    def max_steps(self) -> int:
        return self.settings.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self.settings.max_steps = value

    @property
    def default_root_dir(self) -> str:
        return str(self.settings.default_root_dir)

    @property
    def fast_dev_run(self) -> bool:
        return bool(self.settings.fast_dev_run)

    @property
    def at_step_boundary(self) -> bool:
        """Whether the last batch ended with an optimizer step, so that no gradients are being accumulated."""
        return self._state.at_step_boundary

    @property
    def accumulate_grad_batches(self) -> int:
        """Over how many batches gradients accumulate in the current epoch."""
        return self._state.accumulate_grad_batches

    def schedule_accumulation(self, schedule: dict[int, int]) -> None:
        """Accumulate gradients over that many batches from each of these epochs on; from the next epoch that begins.

        Raises:
            ConfigError: no number for epoch 0, or the strategy cannot accumulate.
        """
        self._state.accumulation = read_accumulation(schedule, "the schedule")
        strategy = self.run.stack.strategies[-1]
        if all(factor == 1 for factor in schedule.values()):
            return
        if self.run.provides(STEPS_IN_BACKWARD):
            raise ConfigError(
                f"gradients are to accumulate by {schedule}, and a callback steps parameters in backward",
                expected="1", do="drop one of the two",
            )  # fmt: skip
        if ACCUMULATION not in strategy.plugin.capabilities.provides:
            raise ConfigError(
                f"gradients are to accumulate by {schedule}, which {strategy} cannot",
                do="choose a strategy that provides 'accumulation' (`stratagem plugins show NAME`)",
            )

    @property
    def effective_batch_size(self) -> int | None:
        """Samples behind one optimizer step, over all processes; None if the loader does not tell its batch size."""
        shards = self.run.mesh.num_data_shards
        return self._state.batch_size and self._state.batch_size * shards * self.accumulate_grad_batches

    # --- Metrics ---------------------------------------------------------------------------------------------------

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return as_numbers(self._bar_values)

    @property
    def _bar_values(self) -> dict[str, Any]:
        """What a progress bar shows now: the loss, and what was logged with ``prog_bar=True``; on their device."""
        loss = mean_loss(self._state.last_outputs, by_count=self._state.sums_losses)
        shown = {} if loss is None else {"loss": loss}
        for name, value in self._state.stage_metrics.step_values().items():
            if self._state.stage_metrics.shown(name, "prog_bar"):
                shown[name] = value
        return shown | self._state.published.bar

    @refuse_unknown_options
    def log_metric(
        self, name: str, value: Tensor | float, *, prog_bar: bool = False, logger: bool = True,
        on_step: bool | None = None, on_epoch: bool | None = None, reduce_fx: ReduceFx = "mean",
        sync_dist: bool = False, batch_size: int | None = None, rank_zero_only: bool = False,
        add_dataloader_idx: bool = True,
    ) -> None:  # fmt: skip
        """Log a metric, as `Module.log` does: ``trainer.log_metric("loss", loss, prog_bar=True)``."""
        options = LogOptions(on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist, rank_zero_only)
        log_metric(self._state, name, value, options, batch_size, add_dataloader_idx)

    # --- Training --------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether training ends after the current batch, once `min_epochs` and `min_steps` are reached."""
        return self._state.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop(f"{_caller()} set trainer.should_stop")
        else:
            self._state.should_stop, self._state.outcome.reason = value, ""

    def stop(self, reason: str) -> None:
        """End training like ``should_stop = True``; the fit's last lines give `reason`, the first one if several do."""
        self.outcome.reason = self.outcome.reason or reason
        self._state.should_stop = True

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.run.optimizers

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.run.lr_scheduler_configs

    def train_in_parts(self, train: Callable[[Any, int, float, bool], Any]) -> PartSteps:
        """Have the rest of this fit train each batch by `train`; see `TrainerView`."""
        self._state.train_batch = train
        return PartSteps(self._state)

    def configure_again(self, loader: Any = None) -> None:
        """Train with `loader`, if given, and call `configure_optimizers` again; see `TrainerView`."""
        self._state.configure_again(loader)

    def leave_after_batch(self, action: Callable[[], Any]) -> None:
        """Call `action` once, after `on_train_batch_end` of all callbacks; it may raise an error to end training."""
        self._state.on_leaving.append(action)

    def trial_steps(self, who: str) -> AbstractContextManager[TrialStep]:
        """Run training steps and undo them afterwards.

        ``with trainer.trial_steps("my callback") as step: loss = step(batch, number)``. Afterwards weights, optimizer,
        precision, random numbers and metrics are as before.

        Raises:
            ConfigError: the module steps by hand, has several optimizers, or one that belongs to an engine.
        """
        from stratagem_trainer.trial import trial_steps

        return trial_steps(self._state, who)

    def accepts(self, **arguments: Any) -> bool:
        """Whether this model could be trained with these `arguments` in place of the trainer's own.

        As far as that is known before processes start: plugins, options and capabilities fit.
        """
        from stratagem_trainer.alternatives import accepts

        return accepts(self._state, arguments)

    @refuse_unknown_options
    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, trainable_only: bool = False) -> None:
        """Write to `filepath` what resuming needs, or with `weights_only` what predicting needs. All ranks call it.

        With `trainable_only` frozen parameters are left out: a model loads it that has them already, such as a base
        model with adapters. One with other frozen parameters is refused.

        `filepath` may be a URL such as ``s3://bucket/run/last.ckpt``.
        """
        from stratagem_trainer import trainer_state

        if self._state.module is None:
            raise ConfigError("save_checkpoint was called before any module was given", do="call it in or after fit")
        self.run.collectives.barrier_with_timeout("save_checkpoint", fit_state.BARRIER_TIMEOUT_S)
        with in_mode(self._state, "eval"):
            with collecting():
                state = trainer_state.dump(self._state, weights_only, trainable_only)
            self._state.events.emit("on_save_checkpoint", checkpoint=state)
            self.run.ask("save_checkpoint", state=state, path=as_path(filepath))
        saved = SavedCheckpoint(as_path(filepath), self.global_step, resumable=not (weights_only or trainable_only))
        self._state.outcome.newest_checkpoint = saved
        self.run.saver.afterwards(saved.mark_written)


def _caller() -> str:
    """Return the function that set an attribute of the view, as ``Class.method``."""
    return sys._getframe(2).f_code.co_qualname.replace("<locals>.", "")


if TYPE_CHECKING:

    def _satisfies(view: View) -> UserView:
        """Checked by mypy: it has all that event hooks and modules use."""
        return view
