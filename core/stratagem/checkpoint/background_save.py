"""Writing while training goes on: one save at a time, in a thread, over process groups of its own.

[Note: what a save in the background promises]
The format copies the state before it calls `submit`; a thread writes the copy. At each optimizer step while a save is
under way the ranks all-reduce a done flag, so all see completion, or the failure, at the same step. The next save, the
next load and the end of `fit` wait for it. An action that is to follow a successful save (deleting an older checkpoint)
is passed to `afterwards`, and dropped if the save fails.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable

import torch

from stratagem.api.world import Collectives
from stratagem.errors import StratagemError


class Saver:
    """The saves of one run; see [Note: what a save in the background promises]."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        #: A save is under way. All ranks agree on it.
        self.busy = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        #: The thread takes no more into its list of what comes afterwards.
        self._over = True
        self._error: BaseException | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._finishes_at_exit = False
        #: Conversations apart from training's: the thread's, and that of the steps that ask for it.
        self._apart: tuple[Collectives, Collectives] | None = None

    def connect(self) -> tuple[Collectives, Collectives]:
        """Return the collectives that saves in the background use; made in the first call. Collective."""
        if self._apart is None:
            self._apart = (self._collectives.apart(), self._collectives.apart())
        return self._apart

    def submit(self, write: Callable[[Collectives], None], background: bool) -> None:
        """Call `write` with collectives to use: now, or in the background. Collective.

        Raises:
            whatever `write` raises, if it runs now; whatever the save before this one raised.
        """
        self.wait()
        if not background:
            write(self._collectives)
            return
        apart = self.connect()
        self._error, self._afterwards, self._over = None, [], False
        if not self._finishes_at_exit:
            self._finishes_at_exit = True
            # Later, at atexit, no thread pool takes anything any more, neither ours nor that of an object store.
            getattr(threading, "_register_atexit", atexit.register)(_finish, weakref.ref(self))
        self._thread = threading.Thread(target=self._work, args=(write, apart[0]), name="stratagem-save")
        self.busy = True
        self._thread.start()

    def _work(self, write: Callable[[Collectives], None], collectives: Collectives) -> None:
        error: BaseException | None = None
        try:
            write(collectives)
        except Exception as caught:  # noqa: BLE001 - it is raised where training goes on
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
        """Call `action` once the save under way has succeeded; now, if there is none; never, if it fails."""
        with self._lock:
            if not self._over:
                self._afterwards.append(action)
                return
        if self._error is None:
            action()

    def check(self) -> None:
        """At a step, while `busy`: learn whether the save has ended, on all ranks at once. Collective.

        Raises:
            whatever the save raised.
        """
        assert self._thread is not None
        assert self._apart is not None
        done = torch.tensor(int(not self._thread.is_alive()))
        if int(self._apart[1].all_reduce(done, "min")):
            self.wait()

    @property
    def is_running(self) -> bool:
        """Whether this rank's part of a save runs in the background."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            whatever the save raised.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, self.busy = None, False
        error, self._error = self._error, None
        if error is not None:
            raise error


def _finish(saver: weakref.ref[Saver]) -> None:
    """Let a script end right after its last save. Nobody is left to catch what went wrong, so it is printed."""
    try:
        if (at_work := saver()) is not None:
            at_work.wait()
    except StratagemError as error:
        print(f"stratagem: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001
        text = str(error).splitlines()[0] if str(error) else "no reason given"
        print(f"stratagem: the save under way was not finished ({type(error).__name__}: {text})", file=sys.stderr)
