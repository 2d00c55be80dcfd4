"""Report a metric to an Optuna trial after each validation, and end training when Optuna prunes the trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import not_empty
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback
from stratagem_trainer.api.monitored import monitored

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class OptunaPruning(Callback):
    """Raises `optuna.TrialPruned` on all ranks when the pruner of the study says so; rank 0 asks it.

    It reports after each validation, or after each epoch of a fit without one.

    Under strategies that start worker processes for each fit (``ddp_spawn``, ``ddp_fork``), training ends without an
    error. Call `check_pruned` after ``fit``: it tells the trial what the workers reported, and raises the error.
    """

    #: The trial that Optuna passes to the objective. That of rank 0 decides; other ranks have any trial.
    trial: Any = None
    #: Name of the metric; equal on all ranks, which costs `sync_dist=True` where it is logged.
    monitor: str = field(validator=not_empty)

    #: What was reported, by the number of the validation, and whether the trial was pruned.
    reported: dict[int, float] = field(init=False, factory=dict)
    pruned: bool = field(init=False, default=False)
    #: Values that this process told the trial itself.
    _known_to_trial: set[int] = field(init=False, factory=set)
    #: The trial that `reported` belongs to.
    _trial_of_values: Any = field(init=False, default=None)

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        if stage != "fit":
            return
        error = None
        if trainer.is_global_zero and not callable(getattr(self.trial, "should_prune", None)):
            error = ConfigError(
                f"callbacks.optuna_pruning.trial is {type(self.trial).__name__} on rank 0",
                expected="the trial that study.optimize passes to the objective",
                do='write {"name": "optuna_pruning", "trial": trial, "monitor": "val_loss"} in the objective',
            )
        trainer.run.collectives.fail_together(error)
        if self.trial is not self._trial_of_values:  # an instance that served an earlier trial
            self.reported, self.pruned, self._known_to_trial, self._trial_of_values = {}, False, set(), self.trial

    @hookimpl
    def on_sanity_check_end(self, trainer: TrainerView) -> None:
        monitored(trainer, "callbacks.optuna_pruning", self.monitor)  # a wrong name is an error before training

    @hookimpl
    def on_validation_end(self, trainer: TrainerView) -> None:
        if trainer.fitting:
            self._report(trainer)

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if not trainer.num_val_batches and trainer.position.epoch_ended:
            self._report(trainer)

    def _report(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run or self.pruned:
            return
        value = monitored(trainer, "callbacks.optuna_pruning", self.monitor)
        assert value is not None, "monitored is strict"
        number = len(self.reported)  # of the validation, from 0
        self.reported[number] = value
        error = None
        if trainer.is_global_zero:
            try:
                self._report_values()
                self.pruned = bool(self.trial.should_prune())
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
        trainer.run.collectives.fail_together(error)
        self.pruned = trainer.run.collectives.broadcast_object(self.pruned)
        if not self.pruned:
            return
        if trainer.run.is_worker:
            trainer.should_stop = True  # `reported` and `pruned` are sent back
        else:
            self._raise()

    def check_pruned(self) -> None:
        """Tell the trial what worker processes reported; raise `optuna.TrialPruned` if it was pruned."""
        self._report_values()
        if self.pruned:
            self._raise()

    def _report_values(self) -> None:
        for number in sorted(self.reported.keys() - self._known_to_trial):
            self.trial.report(self.reported[number], number)
            self._known_to_trial.add(number)

    def _raise(self) -> None:
        import optuna

        number = len(self.reported) - 1
        raise optuna.TrialPruned(
            f"trial {getattr(self.trial, 'number', '')} was pruned after report {number}: "
            f"{self.monitor} is {self.reported[number]:.6g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was reported."""
        return {"reported": dict(self.reported), "pruned": self.pruned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was reported; the next value, or `check_pruned`, tells the trial."""
        self.reported, self.pruned = dict(state["reported"]), bool(state["pruned"])
