"""Report metrics and checkpoints to a trial of Ray Tune after each validation, and resume a trial from them."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.readback import as_numbers
from stratagem.errors import ConfigError, nearest, shown
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: Name of the checkpoint in the folder that Tune gets; the format's suffix is added.
_NAME = "checkpoint"
#: Names in a result that Ray Tune computes, and by which it schedules and ends trials.
_TAKEN = (
    "training_iteration",
    "time_total_s",
    "done",
    "config",
    "trial_id",
    "checkpoint_dir_name",
    "should_checkpoint",
)


def resume_path() -> Path | None:
    """Return ``ckpt_path`` for `fit`: the checkpoint from which Tune restored this trial; None if it is a new one."""
    tune = _tune()
    _check_in_trial(tune)
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    is_local = checkpoint.filesystem.type_name == "local"
    folder = Path(checkpoint.path if is_local else checkpoint.to_directory())
    found = [path for path in folder.glob(f"{_NAME}*") if path.suffix != ".sum"]
    if len(found) != 1:
        raise ConfigError(
            f"the trial's checkpoint {folder} has {len(found)} entries '{_NAME}*'",
            expected="one that the callback ray_tune saved",
            do="report checkpoints with it alone, by its option save_checkpoints",
        )
    return found[0]


def _check_every(_instance: Any, _attribute: Any, value: Any) -> None:
    if not isinstance(value, int) or (not isinstance(value, bool) and value < 1):
        raise ConfigError(
            f"callbacks.ray_tune.save_checkpoints is {shown(value)}", expected="true, false or an integer of at least 1"
        )


def _check_metrics(_instance: Any, _attribute: Any, value: Any) -> None:
    if not isinstance(value, str | list | dict):
        return  # the type is checked elsewhere
    names = [value] if isinstance(value, str) else list(value)
    if not names or not all(names):
        raise ConfigError(
            f"callbacks.ray_tune.metrics is {shown(value)}",
            expected="names of metrics",
            do="leave it out to report all that are logged",
        )
    for name in names:
        if name in _TAKEN:
            raise ConfigError(
                f"callbacks.ray_tune.metrics reports {name!r}, a name that Ray Tune uses itself",
                expected="another name",
                do='map another name to the metric, as in {"loss": "val_loss"}',
            )


@define(eq=False, kw_only=True)
class RayTune(Callback):
    """Reports to the trial of Ray Tune in whose function `fit` is called; rank 0 does.

    It reports after each validation, or after each epoch of a fit without one. Where the scheduler stops the trial,
    Ray raises ``SystemExit(0)`` from the report, and ends the process within a fraction of a second.
    """

    #: Names of metrics, or names to report mapped to names of metrics. None: all that are logged.
    metrics: str | list[str] | dict[str, str] | None = field(default=None, validator=_check_metrics)
    #: Report a checkpoint with each report, or with every nth, such that the trial can be paused and resumed.
    save_checkpoints: bool | int = field(default=False, validator=_check_every)

    #: Number of reports so far.
    reports: int = field(init=False, default=0)

    @hookimpl(wrapper=True)
    def launch(self, main: Callable[[], Any], run: RunContext) -> Generator[None, Any, Any]:
        raise ConfigError(
            f"callbacks.ray_tune reports from the trial's process, and the launcher would start {run.num_processes} "
            "others, in which there is no trial",
            expected="a run in the process of the trial",
            do='set devices=1 and strategy="auto", and let Tune run several trials at once',
        )
        yield

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        error = None
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            try:
                _check_in_trial(_tune())
            except ConfigError as caught:
                error = caught
        trainer.run.collectives.fail_together(error)

    @hookimpl
    def on_sanity_check_end(self, trainer: TrainerView) -> None:
        """Refuse names of which validation logged none; others may be of training, and are looked for in a report."""
        missing = self._missing(trainer)
        if missing and len(missing) == len(self._names(trainer)):
            self._refuse(trainer, missing, " in validation")

    @hookimpl(trylast=True)
    def on_validation_end(self, trainer: TrainerView) -> None:
        if trainer.fitting:
            self._report(trainer)

    @hookimpl(trylast=True)
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if not trainer.num_val_batches and trainer.position.epoch_ended:
            self._report(trainer)

    def _report(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run:
            return
        self._refuse(trainer, self._missing(trainer))
        self.reports += 1  # before the checkpoint is saved: a resumed trial does not report this again
        with tempfile.TemporaryDirectory(prefix="stratagem-ray-tune-") as name:
            folder = Path(trainer.run.collectives.broadcast_object(name))
            saves = bool(self.save_checkpoints) and self.reports % int(self.save_checkpoints) == 0
            if saves:
                trainer.save_checkpoint(folder / f"{_NAME}{trainer.run.checkpoint_format.suffix}")
            trainer.run.saver.wait()  # Tune copies the folder; and it may end this process at any report
            if trainer.is_global_zero:
                tune = _tune()
                names = self._names(trainer)
                metrics = trainer.published.exact
                values = as_numbers({shown: metrics[logged] for shown, logged in names.items()})
                tune.report(values, checkpoint=tune.Checkpoint.from_directory(folder) if saves else None)

    def _names(self, trainer: TrainerView) -> dict[str, str]:
        """Return the names of logged metrics by the names to report."""
        if isinstance(self.metrics, dict):
            return self.metrics
        names = [self.metrics] if isinstance(self.metrics, str) else self.metrics
        return {name: name for name in (trainer.callback_metrics if names is None else names)}

    def _missing(self, trainer: TrainerView) -> list[str]:
        return [name for name in self._names(trainer).values() if name not in trainer.callback_metrics]

    def _refuse(self, trainer: TrainerView, missing: list[str], where: str = "") -> None:
        known, error = sorted(trainer.callback_metrics), self._problem(trainer)
        if missing:
            error = ConfigError(
                f"callbacks.ray_tune.metrics has {missing[0]!r}, which nobody logged{where}",
                expected=f"one of {', '.join(known) or 'the logged metrics (there are none yet)'}",
                do=nearest(missing[0], known) or f"log it with self.log({missing[0]!r}, ...)",
            )
        trainer.run.collectives.fail_together(error)

    def _problem(self, trainer: TrainerView) -> ConfigError | None:
        """Return what is wrong with metrics that are all reported: there are none, or one has a name of Ray's."""
        known = sorted(trainer.callback_metrics)
        taken = [name for name in known if name in _TAKEN]
        if self.metrics is not None or (known and not taken):
            return None
        if not known:
            return ConfigError(
                "callbacks.ray_tune reports all metrics that are logged, and there are none",
                expected="at least one",
                do='log one, as in self.log("loss", loss)',
            )
        return ConfigError(
            f"callbacks.ray_tune reports all metrics that are logged, and {taken[0]!r} is a name that Ray Tune uses "
            "itself",
            expected="other names",
            do="log it under another name, or name the metrics to report in callbacks.ray_tune.metrics",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reports."""
        return {"reports": self.reports}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of reports, so that every nth has a checkpoint as before."""
        self.reports = int(state["reports"])


def _tune() -> Any:
    try:
        from ray import tune
    except ImportError as error:
        raise ConfigError(
            f"callback 'ray_tune' cannot import ray.tune ({str(error).splitlines()[0]})",
            do="run `pip install 'ray[tune]'`",
        ) from error
    return tune


def _check_in_trial(tune: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns where there is no trial, which is an error here
        trial = tune.get_context().get_trial_id()
    if trial is None:
        raise ConfigError(
            "callbacks.ray_tune was chosen and this process runs no trial of Ray Tune",
            expected="fit to be called in the function that tune.Tuner runs",
            do="call it there, or leave the callback out",
        )
