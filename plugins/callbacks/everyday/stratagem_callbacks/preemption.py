"""Save a checkpoint and exit when a scheduler is about to stop the job.

[Note: agreeing on a step]
A signal reaches ranks at different times, or only one of them. A collective after each step would be too expensive, so
a thread on each rank polls a key in the key-value store. A rank with a signal sets the key. Each thread that reads it
posts the number of the last batch that its rank has started; from then on the main thread of the rank starts no other
batch before it has read the posts of all ranks. The highest number is the last batch for all: a rank that has started
it needs the other ranks to finish it.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path
from stratagem.api.validators import more_than, not_empty
from stratagem.errors import ConfigError, PeerError, nearest
from stratagem_callbacks.own_checkpoint import OwnCheckpoint

if TYPE_CHECKING:
    from stratagem.api import TrainerView

#: Seconds that a DataLoader worker continues after SIGTERM: enough for a batch or two.
_WORKER_GRACE_S = 5.0
#: More batches than any run has.
_NO_LIMIT = 10**18
#: Seconds that the end of a fit waits for the polling thread.
_STOP_S = 2.0
#: Seconds to wait for the posts of all ranks.
_POST_TIMEOUT_S = 300.0


@define(eq=False, kw_only=True)
class Preemption(OwnCheckpoint):
    """On a signal to any rank: finish the step, save on all ranks after the same step, and exit with `exit_code`.

    ``fit(ckpt_path="last")`` resumes from there, bit for bit. An existing file that neither this run nor the run that
    it resumes wrote is kept: the name gets ``-v1``.
    """

    #: Names of the signals to handle. Schedulers send SIGTERM before SIGKILL; SIGUSR1 or SIGUSR2 can be requested
    #: earlier.
    signals: list[str] = field(factory=lambda: ["SIGTERM", "SIGUSR1"])
    #: Exit code of the program: 75 is EX_TEMPFAIL, "try again later".
    exit_code: int = 75
    #: Folder to save in; that of the first callback with checkpoints, or ``<default_root_dir>/checkpoints``.
    dirpath: Path | None = None
    #: File name; without a suffix, the checkpoint format's is added.
    filename: str = field(default="preempted", validator=not_empty)
    #: Seconds between two polls: the maximum delay until a rank notices a signal to another one.
    look_every_s: float = field(default=0.25, validator=more_than(0))

    _watcher: Any = field(init=False, default=None)
    _earlier: dict[int, Any] = field(init=False, factory=dict)

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

    def folder(self, trainer: TrainerView) -> Path:
        """Return the folder to save in."""
        if self.dirpath is not None:
            return as_path(self.dirpath)
        others = [c for c in trainer.callbacks if c is not self and hasattr(c, "folder")]
        return others[0].folder(trainer) if others else Path(trainer.default_root_dir) / "checkpoints"

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "preemption handles signals, and fit was called outside the main thread", expected="the main thread"
            )
        self._stop_watching()
        self._watcher = _SignalWatcher(
            trainer.run.collectives.key_value_store(), trainer.global_rank, trainer.world_size, self.look_every_s
        )
        if not self.signals:
            raise ConfigError("preemption.signals is empty", expected="names of signals, such as ['SIGTERM']")
        for name in self.signals:
            number = getattr(signal, name)
            self._earlier[number] = signal.signal(number, self._watcher.signalled)
        _let_workers_continue(trainer.train_dataloader, [getattr(signal, name) for name in self.signals])

    @hookimpl(trylast=True)
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        watcher = self._watcher
        watcher.begun += 1  # counts the next batch, unless training stops below
        if watcher.requested and watcher.last_batch() < watcher.begun and trainer.at_step_boundary:
            trainer.leave_after_batch(functools.partial(self._leave, trainer))

    @hookimpl
    def on_fit_end(self) -> None:
        number = 0 if self._watcher is None else self._watcher.end()
        self._stop_watching()
        if number:  # it came after training: use the original handler
            signal.raise_signal(number)

    @hookimpl
    def on_train_end(self) -> None:
        if self._watcher is not None:
            self._watcher.post_no_limit()

    @hookimpl
    def on_exception(self) -> None:
        self._stop_watching()

    @hookimpl
    def teardown(self) -> None:
        self._stop_watching()

    def _leave(self, trainer: TrainerView) -> None:
        path = self.save(trainer, self.filename)
        trainer.print(f"{self._watcher.reason()}: saved {path} after step {trainer.global_step}; leaving with code "
                      f"{self.exit_code}", flush=True)  # fmt: skip
        raise SystemExit(self.exit_code)

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None
        for number, handler in self._earlier.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that was not Python's
                signal.signal(number, handler)
        self._earlier.clear()


def _let_workers_continue(loader: Any, numbers: list[int]) -> None:
    """Keep DataLoader workers alive for the last batches if the whole process group gets the signal."""
    if getattr(loader, "num_workers", 0):
        loader.worker_init_fn = functools.partial(_ignoring, numbers, loader.worker_init_fn)


def _ignoring(numbers: list[int], then: Any, worker_id: int) -> None:
    for number in numbers:
        # DataLoader also stops its workers with SIGTERM: they exit after a grace period, rather than ignore it.
        signal.signal(number, _exit_later if number == signal.SIGTERM else signal.SIG_IGN)
    if then is not None:
        then(worker_id)


def _exit_later(*_: Any) -> None:
    if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        signal.setitimer(signal.ITIMER_REAL, _WORKER_GRACE_S)


class _SignalWatcher:
    """Handle signals and poll the key-value store on one rank; see [Note: agreeing on a step]."""

    def __init__(self, store: Any, rank: int, world_size: int, look_every_s: float) -> None:
        self.store, self.rank, self.world_size, self.look_every_s = store, rank, world_size, look_every_s
        #: Number of the last batch that this rank has started, or is about to.
        self.begun = 1
        self.requested = False
        self._signal = ""
        self._number = 0
        self._wake = threading.Event()
        self._over = False
        self._last: int | None = None
        self._thread = threading.Thread(target=self._look, daemon=True, name="stratagem-preemption")
        self._thread.start()

    def signalled(self, number: int, _: Any) -> None:
        """Handle a signal to this rank."""
        self._number, self._signal = number, signal.Signals(number).name
        self._wake.set()

    def _look(self) -> None:
        while not self._over:
            self._wake.wait(self.look_every_s)
            with contextlib.suppress(Exception):  # the store is gone when training has ended elsewhere
                if self._signal and self.store.get("stop") is None:
                    self.store.put("stop", f"{self._signal} to rank {self.rank}")
                if self.store.get("stop") is not None:
                    self.requested = True  # before the number is posted: see the note
                    self.store.put(f"begun/{self.rank}", str(self.begun))
                    return

    def last_batch(self) -> int:
        """Return the number of the last batch for all ranks; wait for the numbers of all ranks."""
        deadline = time.monotonic() + _POST_TIMEOUT_S
        while self._last is None:
            posts = [self.store.get(f"begun/{rank}") for rank in range(self.world_size)]
            if None not in posts:
                self._last = max(int(post) for post in posts if post is not None)
            elif time.monotonic() > deadline:
                raise PeerError(
                    f"rank {posts.index(None)} did not answer within {_POST_TIMEOUT_S:.0f} s of {self.reason()}",
                    do="this rank stops without saving",
                )
            else:
                time.sleep(0.01)
        return self._last

    def post_no_limit(self) -> None:
        """Write that this rank has trained all batches, so that no rank stops before that."""
        with contextlib.suppress(Exception):
            self.store.put(f"begun/{self.rank}", str(_NO_LIMIT))

    def end(self) -> int:
        """Return the signal that this rank received and did not handle; 0 if there is none."""
        return self._number

    def reason(self) -> str:
        """Return the signal that stopped training, and the rank that received it."""
        return str(self.store.get("stop"))

    def stop(self) -> None:
        self._over = True
        self._wake.set()
        self._thread.join(_STOP_S)  # it may be blocked in a request to a store that is gone
