"""Show progress on rank 0: a rich bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import Callback, hookimpl
from stratagem.api.notebook import in_notebook
from stratagem.api.readback import Readback
from stratagem.api.validators import more_than

if TYPE_CHECKING:
    from stratagem.api import TrainerView


@define(eq=False, kw_only=True)
class ProgressBar(Callback):
    """Show epoch, batches, rate, remaining time, the loss and metrics logged with ``prog_bar=True``."""

    #: Seconds between two updates of the bar: each update takes some time.
    refresh_every_s: float = field(default=0.25, validator=more_than(0))
    #: Seconds between two lines if the output is not a terminal.
    line_every_s: float = field(default=10.0, validator=more_than(0))

    _view: Any = field(init=False, default=None)
    _due: float = field(init=False, default=math.inf)
    _began: float = field(init=False, default=0.0)
    _first_batch: int = field(init=False, default=0)
    _standalone: bool = field(init=False, default=False)
    #: Metrics of the next update, being copied from the device.
    _pending: Readback | None = field(init=False, default=None)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        if trainer.is_global_zero:
            self._open(trainer)
            self._start_epoch(trainer)  # on_train_epoch_start is not called when resuming within an epoch
            world, size = trainer.world_size, trainer.effective_batch_size
            text = f"{world} process{'es' if world > 1 else ''} on {trainer.run.device.type}"
            self._view.print_line(text + (f", effective batch size {size}" if size else ""))

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        if self._view is not None:
            self._start_epoch(trainer)
            self._show(trainer)

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, batch_idx: int) -> None:
        # On a GPU the metrics of a batch are ready some batches later; reading them now would synchronize.
        if self._pending is None and time.perf_counter() >= self._due:
            self._pending = Readback(trainer.progress_bar_metrics)
        if self._pending is not None and self._pending.ready:
            self._show(trainer, batch_idx + 1)

    @hookimpl
    def on_validation_start(self, trainer: TrainerView) -> None:
        if not trainer.sanity_checking:
            self._start_pass(trainer, "validation", trainer.num_val_batches)

    @hookimpl
    def on_validation_batch_end(self) -> None:
        self._advance()

    @hookimpl
    def on_validation_end(self) -> None:
        self._end_pass()

    @hookimpl
    def on_test_start(self, trainer: TrainerView) -> None:
        self._start_pass(trainer, "test", trainer.num_test_batches)

    @hookimpl
    def on_test_batch_end(self) -> None:
        self._advance()

    @hookimpl
    def on_test_end(self) -> None:
        self._end_pass()

    @hookimpl
    def on_predict_start(self, trainer: TrainerView) -> None:
        self._start_pass(trainer, "predict", trainer.num_predict_batches)

    @hookimpl
    def on_predict_batch_end(self) -> None:
        self._advance()

    @hookimpl
    def on_predict_end(self) -> None:
        self._end_pass()

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if self._view is not None:
            self._show(trainer, trainer.position.batches_done, final=True)

    @hookimpl
    def on_train_end(self) -> None:
        self._close()

    @hookimpl
    def on_exception(self) -> None:
        self._close()

    @hookimpl
    def teardown(self) -> None:
        self._close()

    def _start_epoch(self, trainer: TrainerView) -> None:
        self._began, self._first_batch = time.perf_counter(), trainer.position.batches_done

    def _start_pass(self, trainer: TrainerView, title: str, sizes: list[float]) -> None:
        """Show an evaluation, within training or alone."""
        if not trainer.is_global_zero:
            return
        self._standalone = self._view is None
        if self._standalone:
            self._open(trainer, training=False)
        self._view.start_pass(title, sum(sizes))

    def _advance(self) -> None:
        if self._view is not None and self._view.evaluating:
            self._view.advance()

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
        return _Bar(training)

    def _notebook_bar(self, training: bool) -> Any:
        """Return the view for notebooks."""
        return _NotebookLine()

    def _close(self) -> None:
        view, self._view, self._due, self._pending = self._view, None, math.inf, None
        if view is not None:
            view.close()

    def _show(self, trainer: TrainerView, done: int = 0, final: bool = False) -> None:
        now = time.perf_counter()
        self._due = now + (self.refresh_every_s if not isinstance(self._view, _Lines) else self.line_every_s)
        if self._first_batch and not done:
            done = self._first_batch
        seconds = now - self._began
        rate = (done - self._first_batch) / seconds if seconds > 0 else 0.0
        epochs, total = trainer.max_epochs, trainer.num_training_batches
        title = f"epoch {trainer.current_epoch + 1}" + (f"/{epochs}" if epochs > 0 else "")
        pending, self._pending = self._pending, None
        if pending is None or final:
            pending = Readback(trainer.progress_bar_metrics)
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in pending.numbers().items())
        self._view.show(title, done, _end_of(trainer, done, total), rate, numbers, final)


def _end_of(trainer: TrainerView, done: int, total: float) -> float:
    """Return the last batch of this epoch: before its end if `max_steps` is reached first."""
    if trainer.max_steps < 0:
        return total
    left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return min(total, done + left)


class _Lines:
    """Print lines, for files and pipes."""

    evaluating = False

    def print_line(self, text: str) -> None:
        print(text, flush=True)

    def show(self, title: str, done: int, total: float, rate: float, numbers: str, final: bool) -> None:
        if not done:
            return
        of = "" if math.isinf(total) else f"/{int(total)}"
        self.print_line(f"{title}  batch {done}{of}  {rate:.1f} it/s  {numbers}".rstrip())

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

    def show(self, title: str, done: int, total: float, rate: float, numbers: str, final: bool) -> None:
        of = "" if math.isinf(total) else f"/{int(total)}"
        self._write(f"{title}  batch {done}{of}  {rate:.1f} it/s  {numbers}".rstrip())
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


class _Bar:
    """Draw a rich progress bar, and a second one during evaluation."""

    evaluating = False

    def __init__(self, training: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[numbers]}"),
            auto_refresh=False,
        )  # fmt: skip
        self.training: Any = self.progress.add_task("", rate="", numbers="") if training else None
        self.evaluation: Any = None
        self.next_refresh = 0.0
        self.done = 0
        self.progress.start()

    def print_line(self, text: str) -> None:
        self.progress.console.print(text)

    def show(self, title: str, done: int, total: float, rate: float, numbers: str, final: bool) -> None:
        if done < self.done:
            self.progress.reset(self.training)  # a new epoch: otherwise rich keeps the task finished
        self.done = done
        self.progress.update(
            self.training, description=title, completed=done, total=_as_count(total), rate=f"{rate:.1f} it/s",
            numbers=numbers, refresh=True,
        )  # fmt: skip

    def start_pass(self, title: str, total: float) -> None:
        self.evaluating = True
        self.evaluation = self.progress.add_task(title, total=_as_count(total), rate="", numbers="")
        self.progress.refresh()

    def advance(self) -> None:
        due = time.perf_counter() >= self.next_refresh
        self.progress.update(self.evaluation, advance=1, refresh=due)
        if due:
            self.next_refresh = time.perf_counter() + 0.25

    def end_pass(self) -> None:
        if not self.evaluating:
            return  # a sanity check shows nothing
        self.evaluating = False
        if self.training is not None:
            self.progress.remove_task(self.evaluation)
        self.progress.refresh()

    def close(self) -> None:
        self.progress.stop()


def _as_count(total: float) -> int | None:
    return None if math.isinf(total) else int(total)
