"""Start local processes with a place each, watch them, and end them together.

[Note: supervision]
When a process dies the others are ended within seconds, and what is shown is the *root* error: the one of the rank that
was not merely told by a broken connection that somebody else had died. Each process leaves a report of its error in a
folder that the parent made. Processes stay in the parent's process group, and die with it, also when it is killed: on
Linux the kernel sees to that (PR_SET_PDEATHSIG); elsewhere each process looks for its parent once a second. A process
that the parent itself made end is never the cause of anything: its exit code is the parent's doing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from stratagem.api.peer_errors import is_echo
from stratagem.distributed.launched import libc, set_beside
from stratagem.distributed.reports import left
from stratagem_launchers_local.children import END_S, Child, end, wait_until
from stratagem_launchers_local.reports import read_report, root_cause

#: How long a process may take to notice that another died.
NOTICE_S = 4.0

_HELD = (signal.SIGTERM, signal.SIGINT)


# --- Life and death ----------------------------------------------------------------------------------------------


def start_for_good(start: Callable[[], Any]) -> Any:
    """Call `start`, which starts processes, from a thread that lives as long as this process; return its result.

    Processes that `die_with` their parent would otherwise die with a worker thread that happened to start them.
    """
    if sys.platform == "linux":
        libc()
    if threading.current_thread() is threading.main_thread():
        return start()
    outcome: Future[Any] = Future()

    def keep() -> None:
        try:
            outcome.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            outcome.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=keep, daemon=True, name="stratagem-parent").start()
    return outcome.result()


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Within: SIGTERM ends this process with code 143 in order, so that it can end its children and tidy up first.

    Nothing changes where somebody handles the signal already, nor outside the main thread.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Within: SIGTERM and SIGINT wait, so that this process knows of all that it started when one ends it.

    A process that is forked within holds them too, until `forget_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_on_sigterm(*_: object) -> None:
    raise SystemExit(143)


def forget_signals() -> None:
    """In a forked child: undo the parent's `ending_on_sigterm` and `holding_signals`."""
    if signal.getsignal(signal.SIGTERM) is _exit_on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _ending_code(code: int | None, folder: Path, rank: int) -> int | None:
    """Return `code`, but 0 for a process that was aborted while tidying up.

    A thread that a library of torch's leaves behind can abort a process whose work is done (std::terminate, seen with
    torch 2.13 and gloo about once in thirty runs of a script that never closes its trainer).
    """
    return 0 if code == -signal.SIGABRT and left(folder, rank).exists() else code


# --- Two ways to wait --------------------------------------------------------------------------------------------


def wait_for(children: list[Child], folder: Path) -> None:
    """Wait until all `children` are done; on the first failure end the others and raise the root cause.

    Raises:
        StratagemError: of the class that the failing process raised, or `LaunchError`; its note holds the traceback.
    """
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() not in (None, 0) for child in children):
                break
            time.sleep(0.01)
        if all(child.poll() == 0 for child in children):
            return
        # Most of the time the others fail too, and their reports may hold the cause.
        wait_until(lambda: _root_is_known(folder) or all(c.poll() is not None for c in children), NOTICE_S)
    finally:
        end(children)
    reports = [read_report(path) for path in folder.glob("*.json")]
    codes = {each.message if each.type == SystemExit.__name__ else "" for each in reports}
    if len(reports) == len(children) and len(codes) == 1 and (code := codes.pop()).isdecimal():
        raise SystemExit(int(code))  # they left in agreement
    cause = root_cause(folder, children)
    assert cause is not None, "a process failed"
    raise cause


def _root_is_known(folder: Path) -> bool:
    reports = [read_report(path) for path in folder.glob("*.json")]
    # A rank that calls sys.exit may have agreed on it with the others: they get the time to do the same.
    return any(not (each.is_echo or each.type == SystemExit.__name__) for each in reports)


class LocalWorkers:
    """The other processes of this node, beside a parent that is one of the ranks itself."""

    def __init__(self, children: list[tuple[int, subprocess.Popen[bytes]]], folder: Path, store: Any) -> None:
        self.children = [
            Child(rank, process.pid, lambda rank=rank, process=process: _ending_code(process.poll(), folder, rank))  # type: ignore[misc]
            for rank, process in children
        ]
        self.folder, self.store = folder, store
        self.ending = threading.Event()
        #: A watcher interrupted the main thread: the next KeyboardInterrupt is not the user's.
        self.interrupted_us = False
        self._owner = os.getpid()
        for rank, process in children:
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        atexit.register(self._at_exit)
        self._earlier_hook, sys.excepthook = sys.excepthook, self._excepthook
        set_beside(self)

    @property
    def were_ended(self) -> bool:
        """Whether there were others, and they were ended."""
        return bool(self.children) and self.ending.is_set()

    def run(self, main: Callable[[], Any]) -> Any:
        """Call `main` as this process's part; an error that another process caused becomes that process's error."""
        try:
            return main()
        except BaseException as error:
            forked = self._owner != os.getpid()  # a copy of this process must not end what its original started
            cause = None if forked else self._settle(error)
            if cause is None:
                raise
            raise cause from None

    def _settle(self, error: BaseException) -> BaseException | None:
        """End everybody after `error` here; return the error of another process if that one was the cause."""
        told = self.interrupted_us and isinstance(error, KeyboardInterrupt)
        if echo := is_echo(error):
            wait_until(lambda: _root_is_known(self.folder) or self._someone_failed(), NOTICE_S)
            wait_until(lambda: _root_is_known(self.folder), 0.5)
        self.ending.set()
        end(self.children)
        return root_cause(self.folder, self.children) if echo or told else None

    def _someone_failed(self) -> bool:
        return any(child.poll() not in (None, 0) for child in self.children)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """When one of them dies and this process does not notice, tell it; if it is stuck, end it."""
        if _ending_code(process.wait(), self.folder, rank) == 0 or self.ending.wait(NOTICE_S):
            return
        self.interrupted_us = True
        _interrupt_main_thread()
        if self.ending.wait(END_S):
            return
        self._print_cause()
        end(self.children)
        shutil.rmtree(self.folder, ignore_errors=True)
        _leave_now()

    def _print_cause(self) -> None:
        cause = root_cause(self.folder, self.children)
        if cause is not None:
            traceback.print_exception(cause, chain=False)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """In a later call than the one that launched: show the cause, not its echo."""
        settled = self.ending.is_set() or self._owner != os.getpid()
        cause = None if settled else self._settle(error)
        if cause is not None:
            traceback.print_exception(cause, chain=False)
        elif not (settled and isinstance(error, KeyboardInterrupt)):
            self._earlier_hook(kind, error, trace)

    def _at_exit(self) -> None:
        """Wait for the others after a normal end; end them after an exception."""
        if self._owner != os.getpid():  # a forked copy of this process
            return
        already_ending = self.ending.is_set()
        self.ending.set()
        if already_ending or getattr(sys, "last_value", None) is not None:
            end(self.children)
        try:
            while any(child.poll() is None for child in self.children):
                time.sleep(0.01)
        except KeyboardInterrupt:
            end(self.children)
        failed = self._someone_failed() and not already_ending
        if failed:
            self._print_cause()
        shutil.rmtree(self.folder, ignore_errors=True)
        if failed:
            _leave_now()


def _interrupt_main_thread() -> None:
    """As Ctrl-C would, also out of a sleep or another wait of the system's; nothing if the program ignores that."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _leave_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
