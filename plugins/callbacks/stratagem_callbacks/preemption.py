"""Save a checkpoint and exit when a scheduler is about to stop the job, and have it start the job again.

The ranks agree on the step as [Note: agreeing on a step] in `signal_watcher` says.

[Note: SIGTERM]
Schedulers send SIGTERM to a job that a user cancels, whose time is up, or that they have requeued themselves, so it
never asks for a requeue: that would start a cancelled job again. After any other signal the save must not be disturbed
by a SIGTERM, which also follows each requeue at once: from then on it only prevents a requeue that is not yet made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import more_than, not_empty
from stratagem.errors import ConfigError, LaunchError, nearest
from stratagem_callbacks.own_checkpoint import OwnCheckpoint
from stratagem_callbacks.signal_watcher import SignalWatcher
from stratagem_callbacks.workers import let_workers_continue

if TYPE_CHECKING:
    from collections.abc import Callable

    from stratagem_trainer.api import TrainerView

_NOT_REQUEUED = "; not requeued, since SIGTERM ends a job that is cancelled or whose time is up"
#: Seconds for the scheduler to answer.
_REQUEUE_TIMEOUT_S = 60.0


@define(eq=False, kw_only=True)
class Preemption(OwnCheckpoint):
    """On a signal to any rank: finish the step, save on all ranks after the same step, and exit with `exit_code`.

    ``fit(ckpt_path="last")`` resumes from there, bit for bit; ``ckpt_path="hpc"`` does even if another checkpoint is
    newer. An existing file that neither this run nor the run that it resumes wrote is kept: the name gets ``-v1``.
    """

    roles: ClassVar[frozenset[str]] = frozenset({"checkpoint-folder", "checkpoint-on-signal"})

    #: Names of the signals to handle. Schedulers send SIGTERM before SIGKILL; SIGUSR1 or SIGUSR2 can be requested
    #: earlier.
    signals: list[str] = field(factory=lambda: ["SIGTERM", "SIGUSR1"])
    #: Exit code of the program: 75 is EX_TEMPFAIL, "try again later".
    exit_code: int = 75
    #: After the save, have the scheduler start the job again, but not after SIGTERM: "auto" where the environment can;
    #: True is an error where it cannot. If the scheduler refuses, that is an error, with its own exit code.
    requeue: bool | Literal["auto"] = "auto"
    #: Folder to save in; that of the first callback with checkpoints, or ``<default_root_dir>/checkpoints``.
    dirpath: Path | None = None
    #: File name; without a suffix, the checkpoint format's is added.
    filename: str = field(default="preempted", validator=not_empty)
    #: Seconds between two polls: the maximum delay until a rank notices a signal to another one.
    look_every_s: float = field(default=0.25, validator=more_than(0))

    _watcher: Any = field(init=False, default=None)
    _earlier: dict[int, Any] = field(init=False, factory=dict)
    #: The first signal, and whether SIGTERM followed it.
    _received: int = field(init=False, default=0)
    _terminated: bool = field(init=False, default=False)
    #: Asks the scheduler to start the job again; empty if it cannot, or must not be asked.
    _command: list[str] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        known = [name for name in dir(signal) if name.startswith("SIG") and not name.startswith("SIG_")]
        if not self.signals:
            raise ConfigError("preemption.signals is empty", expected="names of signals, such as ['SIGTERM']")
        for name in self.signals:
            if name not in known:
                raise ConfigError(
                    f"preemption.signals names {name!r}", expected="signals of this system", do=nearest(name, known)
                )
            if name in ("SIGKILL", "SIGSTOP"):
                raise ConfigError(f"preemption.signals names {name!r}", expected="a signal that a process can catch")
        if not 0 < self.exit_code < 256:
            raise ConfigError(f"preemption.exit_code is {self.exit_code}", expected="a number from 1 to 255")

    def saved_on_signal(self, path: Path) -> bool:
        """Whether `path` has a name that this callback gives to its files; for ``ckpt_path="hpc"``."""
        name = Path(self.filename)
        return re.fullmatch(re.escape(name.stem if name.suffix else name.name) + r"(-v\d+)?", path.stem) is not None

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        super().setup(trainer, stage)
        if stage != "fit":
            return
        if threading.current_thread() is not threading.main_thread():
            if self not in trainer.callbacks:  # the environment added it
                warnings.warn(
                    "fit was called outside the main thread, so no signal saves or requeues this job", stacklevel=2
                )
                return
            raise ConfigError(
                "preemption handles signals, and fit was called outside the main thread", expected="the main thread"
            )
        self._stop_watching()
        self._received, self._terminated = 0, False
        command = None if self.requeue is False else trainer.run.environment.requeue_command()
        if self.requeue is True and command is None:
            raise ConfigError(
                f"preemption.requeue is True, and {type(trainer.run.environment).__name__} has no command that starts "
                "this job again",
                expected="a batch job of a scheduler", do='submit one, or set preemption.requeue to "auto"',
            )  # fmt: skip
        self._command = command or []
        for name in self.signals:
            self._handle(getattr(signal, name), self._signalled)
        if self._command and signal.SIGTERM not in self._earlier:
            self._handle(signal.SIGTERM, self._ended)

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        self._watcher = SignalWatcher(
            trainer.run.collectives.key_value_store(), trainer.global_rank, trainer.world_size, self.look_every_s,
            name="preemption",
        )  # fmt: skip
        if self._received:  # since `setup`
            self._watcher.signalled(self._received)
        let_workers_continue(trainer.train_dataloader, [getattr(signal, name) for name in self.signals])

    @hookimpl(trylast=True)
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        watcher = self._watcher
        watcher.begun += 1  # counts the next batch, unless training stops below
        if watcher.requested and watcher.last_batch() < watcher.begun and trainer.at_step_boundary:
            trainer.leave_after_batch(functools.partial(self._leave, trainer))

    @hookimpl
    def on_fit_end(self) -> None:
        numbers = {self._received, signal.SIGTERM if self._terminated else 0} - {0}
        self._received, self._terminated = 0, False
        self._stop_watching()
        for number in sorted(numbers, key=lambda each: each == signal.SIGTERM):
            signal.raise_signal(number)  # it came after training: use the original handler

    @hookimpl
    def on_train_end(self) -> None:
        if self._watcher is not None:
            self._watcher.post_no_limit()

    @hookimpl
    def on_exception(self) -> None:
        self._stop_watching()

    teardown = on_exception

    # --- Signals -----------------------------------------------------------------------------------------------------

    def _handle(self, number: int, handler: Callable[[int, Any], None]) -> None:
        self._earlier[number] = signal.signal(number, handler)

    def _signalled(self, number: int, _: Any) -> None:
        """Handle one of `signals`: the first one counts."""
        if not self._received:
            self._received = number
            if self._watcher is not None:
                self._watcher.signalled(number)
        self._terminated |= number == signal.SIGTERM

    def _ended(self, number: int, _: Any) -> None:
        """Handle a SIGTERM that the user does not ask to handle; see [Note: SIGTERM]."""
        if self._received or (self._watcher is not None and self._watcher.requested):
            self._terminated = True
            return
        signal.signal(number, self._earlier.pop(number))
        signal.raise_signal(number)

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None
        for number, handler in self._earlier.items():
            if self._command and number != signal.SIGTERM and handler is signal.SIG_DFL:
                handler = _tell_that_it_goes_on  # a warning from the scheduler must not kill what follows the fit
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that was not Python's
                signal.signal(number, handler)
        self._earlier.clear()

    # --- Leaving -----------------------------------------------------------------------------------------------------

    def _leave(self, trainer: TrainerView) -> None:
        path, reason = self.save(trainer, self.filename), self._watcher.reason()
        told = f"{reason}: saved {path} after step {trainer.global_step}"
        if self._command and reason.startswith("SIGTERM"):
            told += _NOT_REQUEUED
        elif self._command:
            told += self._requeue(trainer, told)
        trainer.print(f"{told}; leaving with code {self.exit_code}", flush=True)
        trainer.stop(f"preemption: {reason}")
        raise SystemExit(self.exit_code)

    def _requeue(self, trainer: TrainerView, saved: str) -> str:
        """Have the scheduler start the job again, unless SIGTERM came meanwhile; return what was done. Collective.

        Raises:
            LaunchError: the scheduler refuses; on all ranks.
        """
        collectives = trainer.run.collectives
        # All ranks ignore SIGTERM before rank 0 asks the scheduler, which then sends it at once.
        earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if any(collectives.all_gather_object(self._terminated)):
            signal.signal(signal.SIGTERM, earlier)
            return f"; SIGTERM followed{_NOT_REQUEUED}"
        collectives.fail_together(_run(self._command, saved) if trainer.is_global_zero else None)
        self._earlier.pop(signal.SIGTERM, None)  # it stays ignored until the process has ended
        return f"; `{shlex.join(self._command)}`: the job starts again"


def _run(command: list[str], saved: str) -> LaunchError | None:
    """Run `command`; return the error to raise if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_REQUEUE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if done.returncode == 0:
            return None
        problem = f"code {done.returncode}: {' '.join(done.stdout.split())}"
    return LaunchError(
        f"{saved}, and `{shlex.join(command)}` failed ({problem})",
        expected="the scheduler to start the job again", do='submit it again, with ckpt_path="hpc" or "last"',
    )  # fmt: skip


def _tell_that_it_goes_on(number: int, _: Any) -> None:
    # A handler must not use a buffered stream, which may be in use.
    os.write(2, f"stratagem: {signal.Signals(number).name} came outside of a fit: the program goes on\n".encode())
