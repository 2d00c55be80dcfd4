"""Show progress on rank 0: a rich bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.notebook import in_notebook
from stratagem.api.readback import Readback
from stratagem.api.validators import more_than
from stratagem_callbacks.pace import Pace, Progress, batches_left
from stratagem_trainer.api import Callback
from stratagem_trainer.api.published import bar_values

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class ProgressBar(Callback):
    """Show epoch, batches, remaining time, rate, the loss and metrics logged with ``prog_bar=True``.

    Where they do not fit into a line of the terminal, metrics give way first, then the rate and the rest of the run.
    """

    #: Seconds between two updates of the bar: each update takes some time.
    refresh_every_s: float = field(default=0.25, validator=more_than(0))
    #: Seconds between two lines if the output is not a terminal.
    line_every_s: float = field(default=10.0, validator=more_than(0))

    _view: Any = field(init=False, default=None)
    _due: float = field(init=False, default=math.inf)
    _pace: Pace = field(init=False, repr=False, factory=Pace)
    _standalone: bool = field(init=False, default=False)
    #: Metrics of the next update, being copied from the device.
    _pending: Readback | None = field(init=False, default=None)
    #: Texts beside those metrics.
    _texts: list[str] = field(init=False, factory=list)

    @hookimpl(wrapper=True)
    def launch(self, run: RunContext) -> Generator[None, Any, Any]:
        if not run.settings.barebones:
            print(f"starting {run.num_processes} processes, which takes some seconds", flush=True)
        return (yield)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        if trainer.is_global_zero:
            self._open(trainer)
            self._pace = Pace()
            self._pace.start_epoch(trainer.position.batches_done)  # no on_train_epoch_start when resuming within one
            world, size = trainer.world_size, trainer.effective_batch_size
            text = f"{world} process{'es' if world > 1 else ''} on {trainer.run.device.type}"
            self._view.print_line(text + (f", effective batch size {size}" if size else ""))

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        if self._view is not None:
            self._pace.start_epoch(trainer.position.batches_done)
            self._show(trainer)

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, batch_idx: int) -> None:
        # On a GPU the metrics of a batch are ready some batches later; reading them now would synchronize.
        if self._pending is None and time.perf_counter() >= self._due:
            self._pending = self._read_metrics(trainer)
        if self._pending is not None and self._pending.ready:
            self._show(trainer, batch_idx + 1)

    @hookimpl
    def on_validation_start(self, trainer: TrainerView) -> None:
        if not trainer.sanity_checking:
            self._pace.pause()
            self._start_pass(trainer, "validation", trainer.num_val_batches)

    @hookimpl
    def on_validation_batch_end(self) -> None:
        if self._view is not None and self._view.evaluating:
            self._view.advance()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @hookimpl
    def on_validation_end(self) -> None:
        self._pace.go_on()
        self._end_pass()

    @hookimpl
    def on_test_start(self, trainer: TrainerView) -> None:
        self._start_pass(trainer, "test", trainer.num_test_batches)

    @hookimpl
    def on_test_end(self) -> None:
        self._end_pass()

    on_predict_end = on_test_end

    @hookimpl
    def on_predict_start(self, trainer: TrainerView) -> None:
        self._start_pass(trainer, "predict", trainer.num_predict_batches)

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if self._view is not None and self._pace.has_trained(trainer.position.batches_done):
            self._show(trainer, trainer.position.batches_done, final=True)

    @hookimpl
    def on_train_end(self) -> None:
        self._close()

    on_exception = teardown = on_train_end

    def get_metrics(self, trainer: TrainerView, module: nn.Module) -> dict[str, Any]:
        """Return the numbers and texts that are shown; override it to add some, or to leave some out."""
        return bar_values(trainer)

    def _read_metrics(self, trainer: TrainerView) -> Readback:
        metrics = self.get_metrics(trainer, trainer.module) or {}
        self._texts = [f"{name} {value}" for name, value in metrics.items() if isinstance(value, str)]
        return Readback({name: value for name, value in metrics.items() if not isinstance(value, str)})

    def _start_pass(self, trainer: TrainerView, title: str, sizes: list[float]) -> None:
        """Show an evaluation, within training or alone."""
        if not trainer.is_global_zero:
            return
        self._standalone = self._view is None
        if self._standalone:
            self._open(trainer, training=False)
        self._view.start_pass(title, sum(sizes))

    def _end_pass(self) -> None:
        if self._view is not None:
            self._view.end_pass()
        if self._standalone:
            self._standalone = False
            self._close()

    def _open(self, trainer: TrainerView, training: bool = True) -> None:
        self._close()
        drawn = sys.stdout.isatty() and not trainer.settings.barebones
        self._view = self._bar(training) if drawn else self._notebook_bar(training) if in_notebook() else _Lines()
        self._due = 0.0

    def _bar(self, training: bool) -> Any:
        """Return the view for terminals."""
        from stratagem_callbacks.terminal_bar import TerminalBar

        return TerminalBar(training)

    def _notebook_bar(self, training: bool) -> Any:
        """Return the view for notebooks."""
        return _NotebookLine()

    def _close(self) -> None:
        view, self._view, self._due, self._pending = self._view, None, math.inf, None
        if view is not None:
            view.close()

    def _show(self, trainer: TrainerView, done: int = 0, final: bool = False) -> None:
        every = self.line_every_s if isinstance(self._view, _Lines) else self.refresh_every_s
        self._due = time.perf_counter() + every
        done = done or trainer.position.batches_done
        pending, self._pending = self._pending, None
        if pending is None or final:
            pending = self._read_metrics(trainer)
        epochs = f"/{trainer.max_epochs}" if trainer.max_epochs > 0 else ""
        in_epoch, in_run = batches_left(trainer, done)
        self._view.show(
            self._pace.progress(f"epoch {trainer.current_epoch + 1}{epochs}", done, in_epoch, in_run),
            [*_as_texts(pending.numbers()), *self._texts],
            final,
        )


def _as_texts(numbers: dict[str, float]) -> list[str]:
    """Return names with values; the loss is left out if the module logs the same value under a name of its own."""
    loss = numbers.get("loss")
    twice = loss is not None and any(value == loss for name, value in numbers.items() if name != "loss")
    return [f"{name} {value:.4g}" for name, value in numbers.items() if not (twice and name == "loss")]


class _Lines:
    """Print lines, for files and pipes."""

    evaluating = False

    def print_line(self, text: str) -> None:
        print(text, flush=True)

    def show(self, progress: Progress, numbers: list[str], final: bool) -> None:
        if progress.done:
            self.print_line(_line(progress, numbers))

    def start_pass(self, title: str, total: float) -> None:
        pass

    def advance(self) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NotebookLine(_Lines):
    """Rewrite one line: all notebooks can show that, also from a forked process."""

    def __init__(self) -> None:
        self.width = 0
        self.title, self.done, self.total = "", 0, 0.0

    def show(self, progress: Progress, numbers: list[str], final: bool) -> None:
        self._write(_line(progress, numbers))
        if final:
            self._end_line()

    def start_pass(self, title: str, total: float) -> None:
        self.evaluating, self.title, self.done, self.total = True, title, 0, total
        self.due = 0.0

    def advance(self) -> None:
        self.done += 1
        if time.perf_counter() >= self.due:
            self.due = time.perf_counter() + 0.25
            self._write(f"{self.title}  batch {self.done}" + ("" if math.isinf(self.total) else f"/{int(self.total)}"))

    def end_pass(self) -> None:
        self.evaluating = False

    def close(self) -> None:
        self._end_line()

    def _write(self, text: str) -> None:
        sys.stdout.write(f"\r{text:<{self.width}}")
        sys.stdout.flush()
        self.width = len(text)

    def _end_line(self) -> None:
        if self.width:
            print(flush=True)
            self.width = 0


def _line(progress: Progress, numbers: list[str]) -> str:
    batches = f"batch {progress.done}" + ("" if math.isinf(progress.total) else f"/{int(progress.total)}")
    return "  ".join([progress.title, batches, f"{progress.rate:.1f} it/s", *numbers])
