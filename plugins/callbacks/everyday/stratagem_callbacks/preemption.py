"""Save and leave when the machine is about to be taken away.

[Note: agreeing on a step]
A signal reaches ranks at different times, or one of them alone. Asking the others after each step would cost each step
a round trip, so nobody asks: a thread looks at a board now and then, and only when a request hangs there do the ranks
agree. Each thread then posts the number of the last batch that its rank has begun, and from that moment the rank's main
thread begins no other without having read all posts. The highest number posted is the last batch for all: who has begun
it needs the others to finish it.
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

#: Seconds that a loader's worker lives on after a SIGTERM: enough for a batch or two.
_LINGER_S = 5.0
#: More batches than anybody has.
_NO_LIMIT = 10**18
#: Seconds that the end of a fit waits for the thread that looks at the board.
_STOP_S = 2.0
#: Seconds after which a rank that does not answer is taken for dead.
_PATIENCE_S = 300.0


@define(eq=False, kw_only=True)
class Preemption(OwnCheckpoint):
    """On a signal to any rank: finishes the step, saves on all ranks in agreement, and ends with `exit_code`.

    ``fit(ckpt_path="last")`` goes on from there, bit for bit. A file of that name that neither this run nor the run
    that it resumes wrote is kept: the name gets ``-v1``.
    """

    #: Names of the signals to obey. Schedulers send SIGTERM before they kill, and SIGUSR1 or SIGUSR2 earlier if asked.
    signals: list[str] = field(factory=lambda: ["SIGTERM", "SIGUSR1"])
    #: What the program ends with: 75 is the system's word for "try again later".
    exit_code: int = 75
    #: Where to save; the folder of the first callback that keeps checkpoints, or ``<default_root_dir>/checkpoints``.
    dirpath: Path | None = None
    #: Name of the checkpoint; without an ending, the format's own.
    filename: str = field(default="preempted", validator=not_empty)
    #: Seconds between two looks at the board; a rank notices a signal to another one after at most so long.
    look_every_s: float = field(default=0.25, validator=more_than(0))

    _watch: Any = field(init=False, default=None)
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
        """Return where it saves."""
        if self.dirpath is not None:
            return as_path(self.dirpath)
        others = [c for c in trainer.callbacks if c is not self and hasattr(c, "folder")]
        return others[0].folder(trainer) if others else Path(trainer.default_root_dir) / "checkpoints"

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "preemption obeys signals, and fit was called outside the main thread", expected="the main thread"
            )
        self._stop_watching()
        self._watch = _Watch(
            trainer.run.collectives.board(), trainer.global_rank, trainer.world_size, self.look_every_s
        )
        if not self.signals:
            raise ConfigError("preemption.signals is empty", expected="names of signals, such as ['SIGTERM']")
        for name in self.signals:
            number = getattr(signal, name)
            self._earlier[number] = signal.signal(number, self._watch.signalled)
        _let_workers_go_on(trainer.train_dataloader, [getattr(signal, name) for name in self.signals])

    @hookimpl(trylast=True)
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        watch = self._watch
        watch.begun += 1  # the next batch, unless what follows forbids it
        if watch.requested and watch.last_batch() < watch.begun and trainer.at_step_boundary:
            trainer.leave_after_batch(functools.partial(self._leave, trainer))

    @hookimpl
    def on_fit_end(self) -> None:
        number = 0 if self._watch is None else self._watch.end()
        self._stop_watching()
        if number:  # it came when training had ended: it does what it did before
            signal.raise_signal(number)

    @hookimpl
    def on_train_end(self) -> None:
        if self._watch is not None:
            self._watch.post_no_limit()

    @hookimpl
    def on_exception(self) -> None:
        self._stop_watching()

    @hookimpl
    def teardown(self) -> None:
        self._stop_watching()

    def _leave(self, trainer: TrainerView) -> None:
        path = self.save(trainer, self.filename)
        trainer.print(f"{self._watch.reason()}: saved {path} after step {trainer.global_step}; leaving with code "
                      f"{self.exit_code}", flush=True)  # fmt: skip
        raise SystemExit(self.exit_code)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        for number, handler in self._earlier.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that was not Python's
                signal.signal(number, handler)
        self._earlier.clear()


def _let_workers_go_on(loader: Any, numbers: list[int]) -> None:
    """A signal to the whole group of processes must not take away the workers that the last batches come from."""
    if getattr(loader, "num_workers", 0):
        loader.worker_init_fn = functools.partial(_ignoring, numbers, loader.worker_init_fn)


def _ignoring(numbers: list[int], then: Any, worker_id: int) -> None:
    for number in numbers:
        # The interpreter ends its workers by SIGTERM, too: they linger, rather than stay.
        signal.signal(number, _linger if number == signal.SIGTERM else signal.SIG_IGN)
    if then is not None:
        then(worker_id)


def _linger(*_: Any) -> None:
    if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        signal.setitimer(signal.ITIMER_REAL, _LINGER_S)


class _Watch:
    """One rank's eyes on the board; see [Note: agreeing on a step]."""

    def __init__(self, board: Any, rank: int, world_size: int, look_every_s: float) -> None:
        self.board, self.rank, self.world_size, self.look_every_s = board, rank, world_size, look_every_s
        #: Number of the last batch that this rank began, or is about to.
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
            with contextlib.suppress(Exception):  # the store goes when training ends elsewhere
                if self._signal and self.board.get("stop") is None:
                    self.board.put("stop", f"{self._signal} to rank {self.rank}")
                if self.board.get("stop") is not None:
                    self.requested = True  # first this, then the number: see the note
                    self.board.put(f"begun/{self.rank}", str(self.begun))
                    return

    def last_batch(self) -> int:
        """Return the number of the last batch for all; waits for every rank's post."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._last is None:
            posts = [self.board.get(f"begun/{rank}") for rank in range(self.world_size)]
            if None not in posts:
                self._last = max(int(post) for post in posts if post is not None)
            elif time.monotonic() > deadline:
                raise PeerError(
                    f"rank {posts.index(None)} did not answer within {_PATIENCE_S:.0f} s of {self.reason()}",
                    do="this rank stops without saving",
                )
            else:
                time.sleep(0.01)
        return self._last

    def post_no_limit(self) -> None:
        """Tell the others that this rank has trained all there is: nobody is to stop before that."""
        with contextlib.suppress(Exception):
            self.board.put(f"begun/{self.rank}", str(_NO_LIMIT))

    def end(self) -> int:
        """Return the number of the signal that came to this rank and was not obeyed; 0 if there is none."""
        return self._number

    def reason(self) -> str:
        """Return who was told to stop, and how."""
        return str(self.board.get("stop"))

    def stop(self) -> None:
        self._over = True
        self._wake.set()
        self._thread.join(_STOP_S)  # it may be asking a store that is gone
