"""Save on Ctrl-C: finish the step on all ranks, write a checkpoint to resume from, and end the fit."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, more_than, not_empty
from stratagem.distributed.launched import interrupted_by_launcher
from stratagem_callbacks.own_checkpoint import OwnCheckpoint
from stratagem_callbacks.signal_watcher import SignalWatcher
from stratagem_callbacks.workers import let_workers_continue

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView

#: Seconds in which a second SIGINT is the same Ctrl-C: a terminal sends it to all processes, and launchers pass it on.
_SAME_S = 1.0
#: Seconds that a rank waits for the others to agree on the last step.
_PATIENCE_S = 60.0
#: More than the batches of an epoch.
_EPOCH = 1 << 40


@define(eq=False, kw_only=True)
class Interruption(OwnCheckpoint):
    """On Ctrl-C: finish the step, save on all ranks after the same step, and end the fit; a second one ends at once.

    Part of every fit with a callback that keeps checkpoints. ``fit(ckpt_path="last")`` resumes from what it saves. An
    existing file that neither this run nor the run that it resumes wrote is kept: the name gets ``-v1``.
    """

    #: Save if the newest checkpoint to resume from is older than this, in seconds; None: Ctrl-C ends the fit at once.
    save_after_s: float | None = field(default=60.0, validator=at_least(0))
    #: Folder to save in; that of the first callback with checkpoints, or ``<default_root_dir>/checkpoints``.
    dirpath: Path | None = None
    #: File name; without a suffix, the checkpoint format's is added.
    filename: str = field(default="interrupted", validator=not_empty)
    #: Seconds between two polls: the maximum delay until a rank notices a Ctrl-C that only another one got.
    look_every_s: float = field(default=1.0, validator=more_than(0))

    _watcher: Any = field(init=False, default=None)
    _trainer: Any = field(init=False, default=None)
    _process: int = field(init=False, default=0)
    #: When the first SIGINT came.
    _asked_at: float | None = field(init=False, default=None)
    #: It came in a validation of a single process, and the fit ends there.
    _saves_in_validation: bool = field(init=False, default=False)
    #: A validation is under way, and no callback has used its metrics: a fit that resumes repeats it as a whole.
    _can_leave_validation: bool = field(init=False, default=False)

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        if self._acts(trainer):
            for loader in (trainer.train_dataloader, *_several(trainer.val_dataloaders)):
                let_workers_continue(loader, [signal.SIGINT])

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        self._asked_at, self._saves_in_validation, self._can_leave_validation = None, False, False
        if not self._acts(trainer):
            return
        collectives = trainer.run.collectives
        # Another fit of these processes must not read what this one writes.
        name = f"interruption-{collectives.broadcast_object(uuid.uuid4().hex)}"
        self._trainer, self._process = trainer, os.getpid()
        self._watcher = SignalWatcher(
            collectives.key_value_store(), trainer.global_rank, trainer.world_size, self.look_every_s, name=name,
            on_request=self._ask_to_leave, after_post=self._announce, begun=self._number_begun, patience_s=_PATIENCE_S,
        )  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if handler is signal.default_int_handler:  # not one of the program's own
                signal.signal(signal.SIGINT, self._interrupted)

    def _acts(self, trainer: TrainerView) -> bool:
        return self.save_after_s is not None and trainer.checkpoint_callback is not None and not trainer.fast_dev_run

    @hookimpl
    def on_validation_start(self) -> None:
        self._can_leave_validation = True

    @hookimpl(tryfirst=True)
    def on_validation_end(self) -> None:
        self._can_leave_validation = False

    @hookimpl
    def on_train_end(self) -> None:
        if self._watcher is not None:
            self._watcher.post_no_limit()
        self._stop()

    @hookimpl
    def on_fit_end(self) -> None:
        if self._asked_at is not None:
            raise KeyboardInterrupt  # it came in the last step

    @hookimpl
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        self._stop()
        if self._saves_in_validation and isinstance(exception, KeyboardInterrupt):
            self._saves_in_validation = False
            self._save(trainer)

    @hookimpl
    def teardown(self) -> None:
        self._stop()

    def _stop(self) -> None:
        watcher, self._watcher, self._trainer = self._watcher, None, None
        if watcher is not None:
            if signal.getsignal(signal.SIGINT) == self._interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            watcher.stop()

    # --- On Ctrl-C -------------------------------------------------------------------------------------------------

    def _interrupted(self, number: int, frame: Any) -> None:
        """Handle SIGINT in the main thread."""
        watcher, trainer = self._watcher, self._trainer
        # A copy of this process, such as a worker of a DataLoader, and the launcher's report of a failed process.
        if watcher is None or os.getpid() != self._process or interrupted_by_launcher.is_set():
            signal.default_int_handler(number, frame)
        if self._asked_at is not None:
            if time.monotonic() - self._asked_at > _SAME_S:
                signal.default_int_handler(number, frame)
            return
        self._asked_at = time.monotonic()
        if trainer.world_size == 1 and trainer.validating and self._can_leave_validation:
            self._saves_in_validation = True
            signal.default_int_handler(number, frame)
        watcher.signalled(number)

    def _ask_to_leave(self) -> None:
        """Have the main thread check after each batch whether it is the last one. Called in the watcher's thread."""
        trainer = self._trainer
        if trainer is not None:
            trainer.leave_after_batch(functools.partial(self._leave, trainer))

    def _announce(self) -> None:
        """Print what happens now. Called in the watcher's thread."""
        trainer = self._trainer
        if trainer is not None and trainer.is_global_zero:
            newest, until = trainer.outcome.newest_checkpoint, "this validation" if trainer.validating else "this step"
            have = f"the newest one is of step {newest.step}" if newest is not None and newest.written else "none yet"
            saves = f"saves a checkpoint ({have})" if self._is_due(trainer) else f"keeps its checkpoints ({have})"
            print(f"Ctrl-C: the fit ends after {until} and {saves}; press Ctrl-C again to end at once", flush=True)

    def _number_begun(self) -> int:
        """Return the number of the batch that the main thread may have begun."""
        trainer = self._trainer
        while True:
            before = _number(trainer)
            time.sleep(0.01)  # lets the main thread finish a change of both parts
            if (now := _number(trainer)) - before < _EPOCH:
                return now + 1

    def _leave(self, trainer: TrainerView) -> None:
        watcher = self._watcher
        if not trainer.at_step_boundary or watcher.last_batch() > _number(trainer):
            trainer.leave_after_batch(functools.partial(self._leave, trainer))
            return
        self._save(trainer)
        trainer.run.collectives.barrier()  # a rank that ended would have the launcher end those that still write
        raise KeyboardInterrupt

    def _save(self, trainer: TrainerView) -> None:
        """Save, unless the newest checkpoint is recent, or another callback saves when the exception is raised."""
        if any(getattr(each, "save_on_exception", False) for each in trainer.callbacks):
            return
        trainer.run.saver.wait()
        if trainer.run.collectives.broadcast_object(self._is_due(trainer)):
            self.save(trainer, self.filename)

    def _is_due(self, trainer: TrainerView) -> bool:
        newest = trainer.outcome.newest_checkpoint
        if newest is None or not (newest.written and newest.resumable):
            return True
        if newest.step == trainer.global_step:
            return False
        assert self.save_after_s is not None
        return time.monotonic() - newest.requested_at > self.save_after_s


def _number(trainer: TrainerView) -> int:
    """Return how far training is, as a number that grows with every batch."""
    return trainer.position.epoch * _EPOCH + trainer.position.batches_done


def _several(loaders: Any) -> list[Any]:
    return [] if loaders is None else loaders if isinstance(loaders, list) else [loaders]
