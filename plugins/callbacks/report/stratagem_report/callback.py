"""Watch a run at little cost, and write the page about it when it ends."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.converters import optional

from stratagem.api import Callback, hookimpl
from stratagem.api.paths import as_path, is_remote, replace_text
from stratagem.api.validators import more_than
from stratagem.errors import ConfigError
from stratagem_report.facts import ending, failure, gather, learning_rates, memory_held
from stratagem_report.history import History
from stratagem_report.page import render

if TYPE_CHECKING:
    from stratagem.api import RunContext, TrainerView

#: A run is sampled at most so often in its whole life so far: a long one ever more rarely.
_SAMPLES = 500


@frozen
class _Mark:
    """Where the last sample was taken: seconds of training, steps and batches of this fit."""

    seconds: float
    step: int
    batches: int


def _local(_: Any, __: Any, value: Any) -> None:
    if value is not None and is_remote(value):
        raise ConfigError(f"Report.path is {str(value)!r}", expected="a path on this machine")


@define(eq=False, kw_only=True)
class Report(Callback):
    """Leaves one self-contained HTML page about the run: outcome, curves, configuration, plugins, hyper-parameters."""

    #: The file; ``report.html`` in ``default_root_dir`` if not given. An earlier one is replaced.
    path: Path | None = field(default=None, converter=optional(as_path), validator=_local)
    #: Seconds between two readings of learning rate, throughput and memory while a run is young: fewer show more detail
    #: and cost a little each.
    sample_every_s: float = field(default=0.2, validator=more_than(0))

    _history: History = field(init=False, factory=History)
    #: This process keeps the record of a fit that is under way.
    _recording: bool = field(init=False, default=False)
    _batches: int = field(init=False, default=0)
    #: When to look again; never, on other ranks.
    _due: float = field(init=False, default=math.inf)
    _began: float = field(init=False, default=0.0)
    _paused_at: float | None = field(init=False, default=None)
    #: Seconds of this fit that went into validation.
    _paused: float = field(init=False, default=0.0)
    _mark: _Mark | None = field(init=False, default=None)
    #: Totals of the fits before this one.
    _earlier: tuple[float, float, int, int] = field(init=False, default=(0.0, 0.0, 0, 0))
    _started_at_step: int = field(init=False, default=0)
    _position: Any = field(init=False, default=None)

    # --- What it watches -----------------------------------------------------------------------------------------

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        self._due, self._mark, self._batches = math.inf, None, 0
        self._recording = trainer.is_global_zero and trainer.settings.writes_files
        if not self._recording:
            return
        step = trainer.global_step
        if step == 0 or self._history.last_step > step:  # another model, or another run's record
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
        self._paused = perf_counter() - self._began  # the sanity check, and what else came before the first batch
        self._mark = _Mark(0.0, trainer.global_step, 0)
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
        """Read everything that is no metric, once a step is done since the last time."""
        mark, step = self._mark, trainer.global_step
        if mark is None or step <= mark.step:
            return
        self._mark = now = _Mark(self._trained_for(), step, self._batches)
        seconds = now.seconds - mark.seconds
        if seconds > 0:
            self._history.put("speed", "steps/s", step, (step - mark.step) / seconds)
            if trainer.batch_size:
                samples = (now.batches - mark.batches) * trainer.batch_size * trainer.run.mesh.num_data_shards
                self._history.put("speed", "samples/s", step, samples / seconds)
        self._sample_state(trainer.run, step)
        self._due = perf_counter() + max(self.sample_every_s, (self._earlier[0] + now.seconds) / _SAMPLES)

    def _sample_state(self, run: RunContext, step: int) -> None:
        self._sample_rates(run, step)
        for name, held in memory_held(run.device).items():
            self._history.put("memory", name, step, held)

    def _sample_rates(self, run: RunContext, step: int) -> None:
        for name, rate in learning_rates(run.optimizers):
            self._history.put("rates", name, step, rate)

    def _trained_for(self) -> float:
        """Return the seconds of this fit in which it trained, and did not validate."""
        now = perf_counter() if self._paused_at is None else self._paused_at
        return now - self._began - self._paused

    # --- How it ends ---------------------------------------------------------------------------------------------

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
            self._finish(trainer, failure(exception))

    def _finish(self, trainer: TrainerView, outcome: dict[str, Any]) -> None:
        self._count(trainer.global_step)
        self._recording, self._due = False, math.inf
        if self._batches or not self._history.outcome:  # a fit that had nothing to do changes nothing
            self._history.outcome = outcome
        self._write(trainer)

    def _count(self, step: int) -> None:
        """Bring the totals of the history up to now."""
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
        """Add what was measured after training to the page about it."""
        if trainer.is_global_zero and trainer.settings.writes_files and self._history.outcome:
            self._write(trainer)

    def _write(self, trainer: TrainerView) -> None:
        path = self.path or Path(trainer.settings.default_root_dir) / "report.html"
        try:
            text = render(gather(trainer, self._history))
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run itself went as it went
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the report {path} could not be written ({reason}); the run itself is not affected, "
                "give Report(path=...) another place next time",
                stacklevel=2,
            )

    # --- What survives a restart ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the history so far."""
        if self._recording:
            self._count(self._position.global_step)
        return self._history.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the history of an earlier run."""
        self._history = History.from_state(state)
