"""Supervise the processes of one node: watch them, and end all of them when one fails.

[Note: supervision]
When a process fails, the others are ended within seconds, or once a save in the background is complete, which all of
them write. Ctrl-C or another signal ends this wait; so does the strategy's `timeout` if one of them hangs. The *root*
error is shown, not the error of a rank whose connection broke because another rank had failed. Each process writes a
report of its error to a folder that the parent created. Processes stay in the parent's process group, and end with the
parent, also when it is killed: on Linux the kernel ends them (PR_SET_PDEATHSIG); elsewhere each process checks once a
second whether its parent still runs. A process that the parent has ended is never the cause.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.distributed.launched import die_with, interrupted_by_launcher, libc, tell_launcher
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.distributed.standard_streams import flush_files
from stratagem.distributed.uncaught_errors import listen
from stratagem.errors import LaunchError, StratagemError, is_echo
from stratagem_evidence import clear, keep
from stratagem_launchers_local.children import END_S, Child, end, wait_until
from stratagem_launchers_local.reports import left, observed, read_report, root_cause
from stratagem_launchers_local.watcher import Watcher

if TYPE_CHECKING:
    from stratagem_evidence import RankEvidence

#: How long a process may take to notice that another died.
NOTICE_S = 4.0

#: How long the processes of this node may take to end after a second Ctrl-C.
_SECOND_S = 2.0

_DELAYED = (signal.SIGTERM, signal.SIGINT)


# --- Start and end -----------------------------------------------------------------------------------------------


def start_for_good(start: Callable[[], Any]) -> Any:
    """Call `start`, which starts processes, from a thread that lives as long as this process; return its result.

    Processes that call `die_with` would otherwise end with the thread that started them.
    """
    if sys.platform == "linux":
        libc()
    if threading.current_thread() is threading.main_thread():
        return start()
    outcome: Future[Any] = Future()

    def keep() -> None:
        try:
            outcome.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            outcome.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=keep, daemon=True, name="stratagem-parent").start()
    return outcome.result()


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise ``SystemExit(143)`` in the block, so that this process ends its children and cleans up.

    Does nothing if the signal has a handler already, or outside of the main thread.
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
    """Delay SIGTERM and SIGINT to the end of the block, so that no started process is missing when one ends this one.

    A process that is forked in the block delays them too, until it calls `forget_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DELAYED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_on_sigterm(*_: object) -> None:
    raise SystemExit(143)


def forget_signals() -> None:
    """Undo the parent's `ending_on_sigterm` and `holding_signals`, in a forked child."""
    if signal.getsignal(signal.SIGTERM) is _exit_on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DELAYED)


def _ending_code(code: int | None, folder: Path, rank: int) -> int | None:
    """Return `code`, but 0 for a process that was aborted during its final cleanup.

    A thread that a library of torch did not stop can abort a process whose work is done (std::terminate, seen with
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
        try:
            _wait_until_one_fails(children)
        except KeyboardInterrupt:
            _pass_on(children)
            raise
        if all(child.poll() == 0 for child in children):
            return
        # Most of the time the others fail too, and their reports may hold the cause.
        wait_until(lambda: _root_is_known(folder) or all(c.poll() is not None for c in children), NOTICE_S)
        evidence = observed(folder, children)
    finally:
        end(children)
    reports = [read_report(path) for path in folder.glob("*.json")]
    codes = {each.message if each.type == SystemExit.__name__ else "" for each in reports}
    if len(reports) == len(children) and len(codes) == 1 and (code := codes.pop()).isdecimal():
        raise SystemExit(int(code))  # all ranks called sys.exit with this code
    cause = root_cause(folder, children, evidence)
    assert cause is not None, "a process failed"
    raise cause


def _wait_until_one_fails(children: list[Child]) -> None:
    while any(child.poll() is None for child in children):
        if any(child.poll() not in (None, 0) for child in children):
            return
        time.sleep(0.01)


def _pass_on(children: list[Child]) -> None:
    """After Ctrl-C wait for `children`, which may save first; a second one raises KeyboardInterrupt here."""
    for child in children:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)  # a terminal has sent it to them, other programs only to this one
    try:
        while all(child.poll() is None for child in children):
            time.sleep(0.01)
    except KeyboardInterrupt:
        wait_until(lambda: all(child.poll() is not None for child in children), _SECOND_S)
        raise
    wait_until(lambda: all(child.poll() is not None for child in children), NOTICE_S)


def _root_is_known(folder: Path) -> bool:
    reports = [read_report(path) for path in folder.glob("*.json")]
    # All ranks may call sys.exit together: if one has, wait for the others.
    return any(not (each.is_echo or each.type == SystemExit.__name__) for each in reports)


class LocalWorkers:
    """The launched processes of this node, where the parent is a rank, too."""

    def __init__(self, children: list[tuple[int, subprocess.Popen[bytes]]], folder: Path, store: Any) -> None:
        self.children = [
            Child(rank, process.pid, lambda rank=rank, process=process: _ending_code(process.poll(), folder, rank))  # type: ignore[misc]
            for rank, process in children
        ]
        self.folder, self.store, self.watcher = folder, store, Watcher(folder, int(os.environ["RANK"]))
        self.ending = threading.Event()
        #: Python would end with the exit code of Ctrl-C.
        self._fails_interrupted = False
        self._owner = os.getpid()
        for rank, process in children:
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        atexit.register(self._at_exit)
        listen(self._print_root_cause)
        global _beside
        _beside = self

    def run(self, main: Callable[[], Any]) -> Any:
        """Return the result of `main`; if it fails because another process failed, raise that process's error."""
        try:
            return main()
        except BaseException as error:
            forked = self._owner != os.getpid()  # a forked copy must not end its parent's processes
            cause = None if forked else self._settle(error)
            if cause is None:
                raise
            raise cause from None

    def _settle(self, error: BaseException) -> BaseException | None:
        """End all launched processes after `error` in this one; return another process's error if that is the cause."""
        interrupted = interrupted_by_launcher.is_set() and isinstance(error, KeyboardInterrupt)
        if echo := is_echo(error):
            wait_until(lambda: _root_is_known(self.folder) or self._someone_failed(), NOTICE_S)
            wait_until(lambda: _root_is_known(self.folder), 0.5)
        with contextlib.suppress(BaseException):  # Ctrl-C, or a handler that calls sys.exit: end them now
            _finish_saves(error)
        self.ending.set()
        self.watcher.dismiss()
        evidence = observed(self.folder, self.children)
        end(self.children)
        cause = root_cause(self.folder, self.children, evidence, [int(os.environ["RANK"])] * echo)
        if cause is None and echo and isinstance(error, StratagemError):
            keep(self.folder, evidence, error)  # what this rank has found itself
        clear(self.folder)  # the program may catch the error and end with os._exit
        return cause if echo or interrupted else None

    def _someone_failed(self) -> bool:
        return any(child.poll() not in (None, 0) for child in self.children)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """If the process fails and this one does not notice, interrupt the main thread; if that hangs, exit."""
        if _ending_code(process.wait(), self.folder, rank) == 0 or self.ending.wait(NOTICE_S):
            return
        interrupted_by_launcher.set()
        _interrupt_main_thread()
        if self.ending.wait(END_S):
            return
        self.watcher.dismiss()
        evidence = observed(self.folder, self.children)
        end(self.children)
        self._print_cause(evidence)
        clear(self.folder)
        _exit_now()

    def _print_cause(self, evidence: dict[int, RankEvidence]) -> None:
        cause = root_cause(self.folder, self.children, evidence)
        if cause is not None:
            traceback.print_exception(cause, chain=False)

    def _print_root_cause(self, error: BaseException, print_error: Callable[[], None]) -> None:
        """Print the root cause of an uncaught error that was raised after `run` returned."""
        settled = self.ending.is_set() or self._owner != os.getpid()
        cause = None if settled else self._settle(error)
        if cause is not None:
            traceback.print_exception(cause, chain=False)
            self._fails_interrupted = isinstance(error, KeyboardInterrupt)
        elif not (settled and isinstance(error, KeyboardInterrupt)):
            print_error()

    def _at_exit(self) -> None:
        """Wait for the launched processes at a normal exit; end them after an uncaught exception."""
        if self._owner != os.getpid():  # a forked copy of this process
            return
        already_ending = self.ending.is_set()
        self.ending.set()
        self.watcher.dismiss()
        if already_ending or getattr(sys, "last_value", None) is not None:
            end(self.children)
        try:
            while any(child.poll() is None for child in self.children):
                time.sleep(0.01)
        except KeyboardInterrupt:
            end(self.children)
        failed = self._someone_failed() and not already_ending
        if failed:
            self._print_cause(observed(self.folder, self.children))
        clear(self.folder)
        if failed or self._fails_interrupted:
            _exit_now()


def _finish_saves(error: BaseException) -> None:
    """Let a save in the background finish before the processes that write it are ended because of `error`."""
    from stratagem.checkpoint.background_save import join_saves

    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    told = f"stratagem: {reason}; the processes end once the checkpoint in the background is written (Ctrl-C: at once)"
    join_saves(lambda: print(told, file=sys.stderr, flush=True))


def _interrupt_main_thread() -> None:
    """Send SIGINT to the main thread, which also interrupts system calls; do nothing if the program ignores it."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _exit_now() -> None:
    flush_files()
    os._exit(1)


# --- In a process of the run, launched or not ---------------------------------------------------------------------

#: The processes that this one has launched and trains beside.
_beside: LocalWorkers | None = None


def report_to_launcher() -> None:
    """Report an uncaught error to the launcher instead of printing it, if a launcher ran this program again.

    Raises:
        LaunchError: this process launched the others, and they were ended after an error that the program caught.
    """
    if _beside is not None and _beside.children and _beside.ending.is_set():
        raise LaunchError(
            "the other processes of this program were ended after an error",
            expected="all of them to be running",
            do="start the program again, or use a strategy that forks: it starts new processes for every call",
        )
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is None or os.environ.get(PARENT_VARIABLE) == str(os.getpid()):
        return
    listen(_report_uncaught)
    atexit.register(left(Path(folder), int(os.environ["RANK"])).touch)  # runs after what is registered later
    if sys.platform != "linux":  # on Linux the launcher called prctl before the program began
        die_with(int(os.environ[PARENT_VARIABLE]))


def _report_uncaught(error: BaseException, _print_error: Callable[[], None]) -> None:
    if not isinstance(error, KeyboardInterrupt):
        tell_launcher(error, int(os.environ.get("RANK", "0")))
