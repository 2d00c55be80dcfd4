"""Say in two lines why a fit ended, and where its files are; explain the error if memory ran out."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path, is_remote
from stratagem.errors import is_echo
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class Ending(Callback):
    """Print two lines when a fit ends: the limit, callback, signal or error that ended it, and the files that it wrote.

    They go where the progress bar goes, and to stderr with ``enable_progress_bar=False``. If a call of the trainer ran
    out of memory, its error says what held the memory, and what to change.
    """

    _training: bool = field(init=False, default=False)
    _first_step: int = field(init=False, default=0)
    #: The error to raise in place of one that says that memory ran out.
    _explanation: BaseException | None = field(init=False, default=None, repr=False)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        self._training, self._first_step = trainer.is_global_zero, trainer.global_step

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: TrainerView) -> None:
        if self._training:
            self._training = False
            limit = trainer.outcome.reason.partition("=")[0]
            if limit in ("max_epochs", "max_steps") and trainer.global_step == self._first_step:
                line = (
                    f"nothing was left to train: {trainer.outcome.reason} at step {trainer.global_step}; raise {limit}"
                )
            else:
                line = _line(trainer, trainer.outcome.reason)
            _print(trainer, line, _files(trainer) or "it wrote no files")

    @hookimpl(trylast=True)
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        if isinstance(exception, RuntimeError):
            with contextlib.suppress(Exception):  # memory may be short for that, too: the error must not be lost
                from stratagem_callbacks.memory_errors import explained

                self._explanation = explained(exception, trainer)
        if self._training:
            self._training = False
            found = filter(None, [self._rest(trainer), _files(trainer)])
            _print(trainer, _line(trainer, _reason(trainer, self._explanation or exception)), "; ".join(found))

    @hookimpl(wrapper=True)
    def explain_error(self) -> Generator[None, BaseException, BaseException]:
        error = yield
        explanation, self._explanation = self._explanation, None
        if explanation is None or explanation.__cause__ is not error:
            return error
        explanation.__traceback__, error.__traceback__ = error.__traceback__, None  # one is printed, not both
        return explanation

    def _rest(self, trainer: TrainerView) -> str:
        """Return what a fit that an exception ended can be continued from."""
        newest = trainer.outcome.newest_checkpoint
        if newest is None:
            since = f" since step {self._first_step}, at which this fit started" if self._first_step else ""
            return f"no checkpoint was saved{since}"
        name = f"{_shown(str(newest.path))} (step {newest.step})"
        if not newest.written:
            if not trainer.run.saver.busy:
                return f"the checkpoint {name} was not completed"
            name += ", which is being written and complete once the program has ended"
        if not newest.resumable:
            return f"the newest checkpoint is {name}, with weights only: a fit from it starts at step 0"
        return f"continue with {trainer.outcome.how_to_resume} from {name}"


def _line(trainer: TrainerView, reason: str) -> str:
    """Return where training has ended, and why."""
    place, limit = f"step {trainer.global_step}", trainer.settings.max_epochs or 0
    if not trainer.position.epoch_ended and trainer.position.batches_done:
        place += f" in epoch {trainer.current_epoch + 1}" + (f" of {limit}" if limit > 0 else "")
    return f"training ended at {place}: {reason}"


def _print(trainer: TrainerView, *lines: str) -> None:
    print(*lines, sep="\n", file=sys.stdout if trainer.settings.enable_progress_bar else sys.stderr, flush=True)


def _reason(trainer: TrainerView, exception: BaseException) -> str:
    if isinstance(exception, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(exception, SystemExit):
        reason = f"exit code {exception.code or 0}"
        return f"{trainer.outcome.reason}, {reason}" if trainer.outcome.reason else reason
    return "an error of another process" if is_echo(exception) else type(exception).__name__


def _files(trainer: TrainerView) -> str:
    """Return titles and paths of the files that plugins have written and that exist."""
    files = trainer.run.stack.written_files().items()
    return "; ".join(f"{title}: {_shown(path)}" for title, path in files if _exists(path))


def _exists(path: str) -> bool:
    return is_remote(as_path(path)) or os.path.exists(path)


def _shown(path: str) -> str:
    """Return `path` relative to the current folder, if that is above it."""
    if is_remote(as_path(path)):
        return path
    below = os.path.relpath(path)
    return path if below.startswith(os.pardir) else below
