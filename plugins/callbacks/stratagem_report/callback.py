"""Record a run with little overhead, and write the page when it ends."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.converters import optional

from stratagem.api import hookimpl
from stratagem.api.paths import as_path, is_remote, replace_text
from stratagem.api.validators import more_than
from stratagem.errors import ConfigError
from stratagem_report.facts import ending, failure, gather, learning_rates, memory_used
from stratagem_report.history import History
from stratagem_report.page import render
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: Maximum number of samples of a run: the longer it runs, the longer the time between two samples.
_SAMPLES = 500


@frozen
class _Sample:
    """When the last sample was taken: seconds of training, steps and batches of this fit."""

    seconds: float
    step: int
    batches: int


def _local(_: Any, __: Any, value: Any) -> None:
    if value is not None and is_remote(value):
        raise ConfigError(f"Report.path is {str(value)!r}", expected="a path on this machine")


@define(eq=False, kw_only=True)
class Report(Callback):
    """Write one self-contained HTML page about the run: outcome, curves, configuration, plugins, hyper-parameters."""

    #: The file; ``report.html`` in ``default_root_dir`` if not given. An existing file is replaced.
    path: Path | None = field(default=None, converter=optional(as_path), validator=_local)
    #: Seconds between two samples of learning rate, throughput and memory at the start of a run: fewer show more
    #: detail, but each sample takes some time.
    sample_every_s: float = field(default=0.2, validator=more_than(0))

    _history: History = field(init=False, factory=History)
    #: Whether a fit runs that this process records.
    _recording: bool = field(init=False, default=False)
    _batches: int = field(init=False, default=0)
    #: Time of the next sample; infinite on other ranks.
    _due: float = field(init=False, default=math.inf)
    _began: float = field(init=False, default=0.0)
    _paused_at: float | None = field(init=False, default=None)
    #: Seconds of this fit spent in validation.
    _paused: float = field(init=False, default=0.0)
    _last_sample: _Sample | None = field(init=False, default=None)
    #: Totals of the fits before this one.
    _earlier: tuple[float, float, int, int] = field(init=False, default=(0.0, 0.0, 0, 0))
    _started_at_step: int = field(init=False, default=0)
    _position: Any = field(init=False, default=None)
    #: The page, once it is written.
    _page: Path | None = field(init=False, default=None)

    # --- Recording -----------------------------------------------------------------------------------------------

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        self._due, self._last_sample, self._batches = math.inf, None, 0
        self._recording = trainer.is_global_zero and trainer.settings.writes_files
        if not self._recording:
            return
        step = trainer.global_step
        if step == 0 or self._history.last_step > step:  # another model, or the history of another run
            self._history = History(first_step=step)
        elif self._history.is_empty:
            self._history.first_step = step
        history = self._history
        history.results.clear()
        self._position = trainer.position
        self._earlier = (history.seconds, history.train_seconds, history.steps, history.batches)
        self._began, self._paused, self._paused_at, self._started_at_step = perf_counter(), 0.0, None, step

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        if not self._recording:
            return
        self._paused = perf_counter() - self._began  # the sanity check, and other time before the first batch
        self._last_sample = _Sample(0.0, trainer.global_step, 0)
        self._due = perf_counter() + self.sample_every_s
        self._sample_state(trainer.run, trainer.global_step)

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        self._batches += 1
        if perf_counter() >= self._due:
            self._sample(trainer)

    @hookimpl
    def on_validation_start(self) -> None:
        self._paused_at = perf_counter()

    @hookimpl
    def on_validation_end(self, trainer: TrainerView) -> None:
        if self._recording:
            self._paused += perf_counter() - (self._paused_at or perf_counter())
            self._paused_at = None
        else:
            self._write_again(trainer)

    @hookimpl
    def on_test_end(self, trainer: TrainerView) -> None:
        self._write_again(trainer)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float], step: int, run: RunContext) -> None:
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if not self._recording:
            self._history.results.update(values)  # of `Trainer.validate` or `Trainer.test`
            return
        for name, value in values.items():
            self._history.put("metrics", name, step, value, run.stage)
        if run.stage == "train":
            self._sample_rates(run, step)

    def _sample(self, trainer: TrainerView) -> None:
        """Sample throughput, learning rates and memory, unless no step was made since the last sample."""
        last, step = self._last_sample, trainer.global_step
        if last is None or step <= last.step:
            return
        self._last_sample = now = _Sample(self._trained_for(), step, self._batches)
        seconds = now.seconds - last.seconds
        if seconds > 0:
            self._history.put("speed", "steps/s", step, (step - last.step) / seconds)
            if trainer.batch_size:
                samples = (now.batches - last.batches) * trainer.batch_size * trainer.run.mesh.num_data_shards
                self._history.put("speed", "samples/s", step, samples / seconds)
        self._sample_state(trainer.run, step)
        self._due = perf_counter() + max(self.sample_every_s, (self._earlier[0] + now.seconds) / _SAMPLES)

    def _sample_state(self, run: RunContext, step: int) -> None:
        self._sample_rates(run, step)
        for name, used in memory_used(run.device).items():
            self._history.put("memory", name, step, used)

    def _sample_rates(self, run: RunContext, step: int) -> None:
        for name, rate in learning_rates(run.optimizers):
            self._history.put("rates", name, step, rate)

    def _trained_for(self) -> float:
        """Return the seconds of this fit spent in training, without validation."""
        now = perf_counter() if self._paused_at is None else self._paused_at
        return now - self._began - self._paused

    # --- The end of a run ----------------------------------------------------------------------------------------

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        if self._recording:
            self._sample(trainer)

    @hookimpl
    def on_fit_end(self, trainer: TrainerView) -> None:
        if self._recording:
            self._finish(trainer, ending(trainer))

    @hookimpl
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        if self._recording:
            self._finish(trainer, failure(trainer, exception))

    def _finish(self, trainer: TrainerView, outcome: dict[str, Any]) -> None:
        self._count(trainer.global_step)
        self._recording, self._due = False, math.inf
        if self._batches or not self._history.outcome:  # a fit without batches changes nothing
            self._history.outcome = outcome
        self._write(trainer)

    def _count(self, step: int) -> None:
        """Update the totals of the history."""
        if not self._batches:
            return
        history, began_at = self._history, self._started_at_step
        if began_at > history.first_step and began_at not in history.resumed:
            history.resumed.append(began_at)
        seconds, train_seconds, steps, batches = self._earlier
        history.seconds = seconds + perf_counter() - self._began
        history.train_seconds = train_seconds + self._trained_for()
        history.steps, history.batches = steps + step - began_at, batches + self._batches

    def _write_again(self, trainer: TrainerView) -> None:
        """Write the page again, with results of validation or test after training."""
        if trainer.is_global_zero and trainer.settings.writes_files and self._history.outcome:
            self._write(trainer)

    def written_files(self) -> dict[str, str]:
        """Return the page."""
        return {} if self._page is None else {"report": str(self._page)}

    def _write(self, trainer: TrainerView) -> None:
        path = self.path or Path(trainer.settings.default_root_dir) / "report.html"
        try:
            text = render(gather(trainer, self._history, path))
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
            self._page = path
        except Exception as error:  # noqa: BLE001 - must not change the outcome of the run
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the report {path} could not be written ({reason}); the run itself is not affected; "
                "set Report(path=...) to another path next time",
                stacklevel=2,
            )

    # --- State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the history."""
        if self._recording:
            self._count(self._position.global_step)
        return self._history.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the history of an earlier run."""
        self._history = History.from_state(state)
