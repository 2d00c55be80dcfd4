"""Show where a run is: a rich bar in a terminal, plain lines elsewhere; on rank 0 alone."""

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
    """Epoch, batches, steps per second, time left, the loss and what was logged with ``prog_bar=True``."""

    #: Seconds between two updates of the bar: fewer look smoother and cost a little each.
    refresh_every_s: float = field(default=0.25, validator=more_than(0))
    #: Seconds between two lines where the output is no terminal.
    line_every_s: float = field(default=10.0, validator=more_than(0))

    _view: Any = field(init=False, default=None)
    _due: float = field(init=False, default=math.inf)
    _began: float = field(init=False, default=0.0)
    _first_batch: int = field(init=False, default=0)
    _alone: bool = field(init=False, default=False)
    #: What the next update shows, on its way from the device.
    _coming: Readback | None = field(init=False, default=None)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        if trainer.is_global_zero:
            self._open(trainer)
            self._start_epoch(trainer)  # one that is resumed within does not start again
            world, size = trainer.world_size, trainer.effective_batch_size
            text = f"{world} process{'es' if world > 1 else ''} on {trainer.run.device.type}"
            self._view.say(text + (f", effective batch size {size}" if size else ""))

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        if self._view is not None:
            self._start_epoch(trainer)
            self._show(trainer)

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, batch_idx: int) -> None:
        # On a GPU the numbers of a batch are there some batches later; to read them now would wait for all of it.
        if self._coming is None and time.perf_counter() >= self._due:
            self._coming = Readback(trainer.progress_bar_metrics)
        if self._coming is not None and self._coming.ready:
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
        """Show a pass over evaluation loaders, within training or on its own."""
        if not trainer.is_global_zero:
            return
        self._alone = self._view is None
        if self._alone:
            self._open(trainer, training=False)
        self._view.start_pass(title, sum(sizes))

    def _advance(self) -> None:
        if self._view is not None and self._view.evaluating:
            self._view.advance()

    def _end_pass(self) -> None:
        if self._view is not None:
            self._view.end_pass()
        if self._alone:
            self._alone = False
            self._close()

    def _open(self, trainer: TrainerView, training: bool = True) -> None:
        self._close()
        drawn = sys.stdout.isatty() and not trainer.settings.barebones
        self._view = self._bar(training) if drawn else self._notebook_bar(training) if in_notebook() else _Lines()
        self._due = 0.0

    def _bar(self, training: bool) -> Any:
        """Return what draws where something can be drawn."""
        return _Bar(training)

    def _notebook_bar(self, training: bool) -> Any:
        """Return what draws in a notebook."""
        return _Rewritten()

    def _close(self) -> None:
        view, self._view, self._due, self._coming = self._view, None, math.inf, None
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
        coming, self._coming = self._coming, None
        if coming is None or final:
            coming = Readback(trainer.progress_bar_metrics)
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in coming.numbers().items())
        self._view.show(title, done, _end_of(trainer, done, total), rate, numbers, final)


def _end_of(trainer: TrainerView, done: int, total: float) -> float:
    """Return the batch at which this epoch will end: earlier than its size if the steps run out before."""
    if trainer.max_steps < 0:
        return total
    left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return min(total, done + left)


class _Lines:
    """A line now and then, for files and pipes."""

    evaluating = False

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, title: str, done: int, total: float, rate: float, numbers: str, final: bool) -> None:
        if not done:
            return
        of = "" if math.isinf(total) else f"/{int(total)}"
        self.say(f"{title}  batch {done}{of}  {rate:.1f} it/s  {numbers}".rstrip())

    def start_pass(self, title: str, total: float) -> None:
        pass

    def advance(self) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Rewritten(_Lines):
    """One line that is written again and again: every notebook shows that, also from a copy of its process."""

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
    """A bar that redraws in place; a second one while evaluating."""

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

    def say(self, text: str) -> None:
        self.progress.console.print(text)

    def show(self, title: str, done: int, total: float, rate: float, numbers: str, final: bool) -> None:
        if done < self.done:
            self.progress.reset(self.training)  # another epoch: rich would call the task finished for good
        self.done = done
        self.progress.update(
            self.training, description=title, completed=done, total=_known(total), rate=f"{rate:.1f} it/s",
            numbers=numbers, refresh=True,
        )  # fmt: skip

    def start_pass(self, title: str, total: float) -> None:
        self.evaluating = True
        self.evaluation = self.progress.add_task(title, total=_known(total), rate="", numbers="")
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


def _known(total: float) -> int | None:
    return None if math.isinf(total) else int(total)
