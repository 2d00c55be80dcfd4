"""Save in the background: one save at a time, in a thread, over separate process groups.

[Note: background saves]
The format copies the state before it calls `submit`; a thread writes the copy. At each optimizer step during a save the
ranks ask each other whether it has ended, and read the answer at the next step, so all see completion, or the failure,
at the same step, and none waits. The next save, the next load and the end of `fit` wait for it. Pass an action that
must follow a successful save (deleting an older checkpoint) to `afterwards`; it is dropped if the save fails.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable

from stratagem.api.readback import LateFlag
from stratagem.api.world import Collectives, World
from stratagem.errors import StratagemError

#: The savers of this process.
_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def join_saves(notify: Callable[[], None]) -> None:
    """Wait until no save of this process runs in the background. An error of a save stays for `Saver.wait`.

    Args:
        notify: called before the wait, if there is a save to wait for.
    """
    if running := [saver for saver in _savers if saver.is_running]:
        notify()
        for saver in running:
            saver.join()


class Saver:
    """The saves of one run; see [Note: background saves]."""

    def __init__(self, collectives: Collectives) -> None:
        _savers.add(self)
        self._collectives = collectives
        #: Whether a save is running; the same on all ranks.
        self.busy = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        #: Whether the thread accepts no more actions for `afterwards`.
        self._over = True
        self._error: BaseException | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._finishes_at_exit = False
        #: Collectives that training does not use: for the thread, and for the check at each step.
        self._groups: tuple[Collectives, Collectives] | None = None
        #: Whether the save still runs on some rank, asked at the last step.
        self._asked: LateFlag | None = None

    def connect(self) -> tuple[Collectives, Collectives]:
        """Return the collectives of background saves, created in the first call. Collective."""
        if self._groups is None:
            self._groups = (self._collectives.new_group(), self._collectives.new_group())
        return self._groups

    def submit(self, write: Callable[[Collectives], None], background: bool) -> None:
        """Call `write` with the collectives to use, now or in the background. Collective.

        Raises:
            Exception: an error of `write`, if it runs now; an error of the previous save.
        """
        self.wait()
        if not background:
            write(self._collectives)
            return
        separate = self.connect()
        self._error, self._afterwards, self._over = None, [], False
        if not self._finishes_at_exit:
            self._finishes_at_exit = True
            # Not with atexit: then no thread pool accepts tasks any more, neither this one nor an object store's.
            getattr(threading, "_register_atexit", atexit.register)(_finish, weakref.ref(self))
        thread = threading.Thread(target=self._work, args=(write, separate[0]), name="stratagem-save")
        thread.start()
        self._thread, self.busy = thread, True

    def _work(self, write: Callable[[Collectives], None], collectives: Collectives) -> None:
        error: BaseException | None = None
        try:
            write(collectives)
        except Exception as caught:  # noqa: BLE001 - raised in the training thread
            error = caught
        try:
            collectives.fail_together(error)
        except Exception as caught:  # noqa: BLE001
            self._error = caught
        with self._lock:
            self._over = True
            actions = [] if self._error is not None else self._afterwards
        for action in actions:
            action()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call `action` after the running save has succeeded, or now if none is running; never if the save fails."""
        with self._lock:
            if not self._over:
                self._afterwards.append(action)
                return
        if self._error is None:
            action()

    def check(self) -> None:
        """At a step, while `busy`: learn whether the save had ended on all ranks at the step before. Collective.

        No step waits for a message: the next one reads the answer.

        Raises:
            any error of the save.
        """
        assert self._thread is not None
        assert self._groups is not None
        if self._asked is not None and not self._asked.read():
            self.wait()
            return
        self._asked = self._asked or LateFlag(self._groups[1])
        self._asked.send(self._thread.is_alive())

    @property
    def is_running(self) -> bool:
        """Whether this rank's part of a save runs in the background."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def join(self) -> None:
        """Wait for the running save, if there is one, whatever comes of it."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join(1)  # a signal right before a wait without an end would not interrupt it

    def wait(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            any error of the save.
        """
        self.join()
        self._thread, self.busy, self._asked = None, False, None
        error, self._error = self._error, None
        if error is not None:
            raise error


class SingleProcessRun:
    """The attributes of a `RunContext` that a checkpoint format uses, for one process without plugins."""

    rank, world_size, is_global_zero = 0, 1, True

    def __init__(self) -> None:
        self.world, self.collectives = World(), Collectives()
        self.saver = Saver(self.collectives)


def _finish(saver: weakref.ref[Saver]) -> None:
    """Wait for the last save when a script ends. Its error cannot be caught any more, so it is printed."""
    try:
        if (at_work := saver()) is not None:
            at_work.wait()
    except StratagemError as error:
        print(f"stratagem: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001
        text = str(error).splitlines()[0] if str(error) else "no reason given"
        print(f"stratagem: the last save did not finish ({type(error).__name__}: {text})", file=sys.stderr)
