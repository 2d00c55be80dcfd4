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
import ctypes
import dis
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attrs import define, evolve, frozen

from stratagem import errors
from stratagem.api.world import World
from stratagem.errors import ConfigError, LaunchError, StratagemError

#: "1": whoever launched this process hosts the rendezvous store, and rank 0 joins it like the rest.
STORE_HOSTED_VARIABLE = "STRATAGEM_STORE_HOSTED"
#: The process that launched this one; it does not outlive it.
PARENT_VARIABLE = "STRATAGEM_PARENT_PID"
#: Where this process leaves the report of its error.
REPORTS_VARIABLE = "STRATAGEM_REPORTS"

#: How long a process may take to notice that another died, and to end when told to.
NOTICE_S = 4.0
END_S = 5.0

#: Where the processes of one machine meet: what listens there cannot be reached from others.
LOOPBACK = "127.0.0.1"

_PR_SET_PDEATHSIG = 1
_HELD = (signal.SIGTERM, signal.SIGINT)
#: What gloo, NCCL and the store say when the other side is gone. Whole words: "cannot restore" is somebody's own error.
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|\bsocket|remote process exited|timed out waiting"
    r"|application timeout|operation timeout|\b(work)?nccl|recvvalue failed|\b(tcp|file|hash|prefix)?store\b"
)


def open_standard_streams() -> None:
    """Give a program that was started without standard output or error (``>&-``, a service) null ones.

    Python has None for them, which has no methods; and the next file opened would take their number, and what a
    library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
            setattr(sys, name, stream)


# --- Places ------------------------------------------------------------------------------------------------------


def process_variables(world: World) -> dict[str, str]:
    """Return the environment variables that tell a process its place; an environment plugin reads them back."""
    variables = {
        "RANK": world.rank, "LOCAL_RANK": world.local_rank, "NODE_RANK": world.node_rank,
        "WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.local_world_size,
        "MASTER_ADDR": world.main_address, "MASTER_PORT": world.main_port,
        STORE_HOSTED_VARIABLE: int(world.store_hosted),
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def local_places(world: World) -> list[World]:
    """Return the places of all processes of this node, given local rank 0's."""
    return [evolve(world, rank=world.rank + offset, local_rank=offset) for offset in range(world.local_world_size)]


class RendezvousStore:
    """Where the processes of a launch meet. Its port is taken at once, and nobody can take it; its server starts later.

    Start it once all processes are started: who connects earlier waits in the port's queue. The server's thread looks
    up the names of those who connect, and a process that is forked meanwhile waits for ever for a lock of the C
    library's resolver.
    """

    def __init__(
        self, address: str = LOOPBACK, port: int = 0, *, is_here: bool = True, for_others: bool = False
    ) -> None:
        """Listen on `port`; 0 lets the kernel choose.

        Args:
            is_here: False if another machine hosts the store: there is nothing to do then.
            for_others: listen on all addresses of this machine, for other machines; else on the loopback address.

        Raises:
            LaunchError: the port is taken.
        """
        self.address, self.port = address, port
        self._socket: socket.socket | None = None
        self._store: Any = None
        if is_here:
            self._listen("" if for_others else LOOPBACK)

    def _listen(self, host: str) -> None:
        dual = host == "" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (host, self.port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN
            )
        except OSError as error:
            raise self._cannot_listen(error) from error
        self.port = self._socket.getsockname()[1]

    def serve(self) -> Any:
        """Start the server; return the store.

        Raises:
            LaunchError: the address is not this machine's.
        """
        if self._socket is None:
            return self._store
        import torch.distributed as dist

        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": self._socket.detach()}
        try:
            self._store = dist.TCPStore(self.address, self.port, **options)
        except dist.DistError as error:
            raise self._cannot_listen(error) from error
        self._socket = None  # the server has taken it
        return self._store

    def close(self) -> None:
        """Let go of the port. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._store = None

    def _cannot_listen(self, error: Exception) -> LaunchError:
        return LaunchError(
            f"cannot listen on {self.address}:{self.port} ({error})",
            do="choose another MASTER_PORT, or an address of this machine",
        )


def reserve_store(world: World) -> tuple[World, RendezvousStore]:
    """Return the world with the port of the store that its processes will meet at, and the store, which is to start.

    Node 0's launcher hosts it, or its rank 0, which says so there. On one machine it is at the loopback address.

    Raises:
        LaunchError: the port is taken.
    """
    port, several = world.main_port or 0, world.num_nodes > 1
    address = world.main_address if several else LOOPBACK
    store = RendezvousStore(address, port, is_here=world.node_rank == 0, for_others=several)
    return evolve(world, main_address=address, main_port=store.port or world.main_port, store_hosted=True), store


def check_address(world: World, limit_s: float) -> None:
    """Return once this machine can resolve the address of the store.

    Several nodes may start before the name of one is known: they try again until `limit_s` seconds have passed.

    Raises:
        ConfigError: it cannot.
    """
    deadline = time.monotonic() + (limit_s if world.num_nodes > 1 else 0)
    while error := _resolve(world.main_address, world.main_port, limit_s):
        if time.monotonic() + 1 > deadline:
            raise ConfigError(
                f"MASTER_ADDR is {world.main_address!r}, which this machine cannot resolve ({error})",
                expected="the name or the address of node 0", do="correct it, or export an IP address",
            )  # fmt: skip
        time.sleep(1)


def _resolve(address: str, port: int | None, limit_s: float) -> str:
    """Return what is wrong with `address`. Name servers that do not answer are given up after `limit_s` seconds."""
    errors: list[str] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            errors.append(str(error))

    thread = threading.Thread(target=look_up, daemon=True, name="stratagem-resolve")
    thread.start()
    thread.join(limit_s)
    return f"no answer within {limit_s:g} s" if thread.is_alive() else "".join(errors)


def child_environment(world: World, reports: Path) -> dict[str, str]:
    """Return the whole environment of a process that takes `world`'s place."""
    threads = max(1, (os.cpu_count() or 1) // world.local_world_size)
    return {
        "OMP_NUM_THREADS": str(threads), **os.environ, **process_variables(world),
        PARENT_VARIABLE: str(os.getpid()), REPORTS_VARIABLE: str(reports),
    }  # fmt: skip


def relaunch_command() -> list[str]:
    """Return the command that runs the user's program again, whatever the current directory is now.

    Raises:
        ConfigError: there is no program to run again (a notebook, ``python -c``, a prompt).
    """
    main = sys.modules["__main__"]
    # What the interpreter was given, as the program may have edited sys.argv since.
    flags, program = _split_command(sys.orig_argv[1:])
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        arguments = program[2:] if program[:2] == ["-m", name] else sys.argv[1:]
        return [sys.executable, *flags, "-m", name, *arguments]
    if file is not None and spec is not None:  # a directory or an archive with a __main__.py
        file = os.path.dirname(file)
    if file is None or not os.path.exists(file):
        raise ConfigError(
            "this program has no file to run again in another process",
            expected="a script, or a module run with -m",
            do='pass launcher="fork", which copies this process and works with every strategy, or write a script',
        )
    # Under a debugger or a profiler (python -m pdb train.py) the command was theirs: run the script without them.
    same = bool(program) and os.path.basename(program[0].rstrip("/")) == os.path.basename(file)
    return [sys.executable, *flags, os.path.abspath(file), *(program[1:] if same else sys.argv[1:])]


def _split_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Split what follows ``python`` into its flags and the program (a path, or ``-m`` and a name) with arguments."""
    at = 0
    while at < len(words) and re.match("-.", words[at]):
        valued = re.match(r"-(?!-)([^cmWX]*)([cmWX])(.*)", words[at])
        if valued and valued[2] in "cm":
            others = [f"-{valued[1]}"] if valued[1] else []
            name = [valued[3]] if valued[3] else []
            return words[:at] + others, [f"-{valued[2]}", *name, *words[at + 1 :]]
        at += 2 if words[at] == "--check-hash-based-pycs" or (valued and not valued[3]) else 1
    return words[:at], words[at:]


# --- Life and death ----------------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    """End this process when `parent` ends, however that ends.

    To the kernel the parent is the *thread* that started this process: see `start_for_good`.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the kernel knew
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library; loaded before a fork, as the loader's lock may be held by a thread that the fork does not copy."""
    return ctypes.CDLL(None)


def start_for_good(start: Callable[[], Any]) -> Any:
    """Call `start`, which starts processes, from a thread that lives as long as this process; return its result.

    Processes that `die_with` their parent would otherwise die with a worker thread that happened to start them.
    """
    if sys.platform == "linux":
        _libc()
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


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@define(eq=False)
class Child:
    """A process on this machine."""

    rank: int
    pid: int
    #: Return its exit code, negative for a signal; None while it runs.
    poll: Callable[[], int | None]
    #: The parent made it end.
    was_ended: bool = False


def end(children: Iterable[Child]) -> None:
    """Ask `children` to end, then make them; return when they have."""
    for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        running = [child for child in children if child.poll() is None]
        for child in running:
            child.was_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
        _wait_until(functools.partial(_are_over, running), patience)


def _are_over(children: list[Child]) -> bool:
    return all(child.poll() is not None for child in children)


def _wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- Reports -----------------------------------------------------------------------------------------------------


@frozen
class Report:
    """What a process said before it ended."""

    rank: int
    time: float
    type: str
    message: str
    traceback: str
    #: The parts of a StratagemError, so that the parent can raise the same.
    parts: dict[str, str]
    #: It only tells that a collective failed, which another process caused; see `is_echo`.
    is_echo: bool


def is_echo(error: BaseException) -> bool:
    """Whether `error` comes from a collective that failed because of another process.

    gloo and the store raise a plain RuntimeError from C++. One that Python code raised, outside torch.distributed and
    stratagem, is the user's own, whatever it says; so is every OSError (a data loader's, an HTTP client's).
    """
    if isinstance(error, OSError):
        return False
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if kinds & {"PeerError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return type(error) is RuntimeError and _ECHO.search(str(error).lower()) is not None and not _is_users(error)


def interrupted_by_watcher() -> bool:
    """Whether a KeyboardInterrupt tells of another process of this node that failed, rather than of Ctrl-C."""
    return _companions is not None and _companions.told


def _is_users(error: BaseException) -> bool:
    """Whether a ``raise`` statement outside torch.distributed and stratagem raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and not re.match(r"(torch\.distributed|stratagem\w*)(\.|$)", module)


def report(error: BaseException, rank: int, folder: Path) -> None:
    """Leave the report of `error`; the first one of a process stands."""
    path = folder / f"{rank}.json"
    if path.exists():
        return
    parts = {}
    if isinstance(error, StratagemError):
        parts = {"found": error.found, "expected": error.expected, "do": error.do}
    content = {
        "rank": rank, "time": time.time(), "type": type(error).__name__, "message": str(error),
        "traceback": "".join(traceback.format_exception(error)), "parts": parts, "is_echo": is_echo(error),
    }  # fmt: skip
    with contextlib.suppress(OSError):
        staged = path.with_suffix(".staged")
        staged.write_text(json.dumps(content))
        staged.rename(path)


def join_supervision() -> None:
    """In a process that a launcher started by running the program again: report what ends it, rather than print it.

    Raises:
        LaunchError: this is their parent, and they were ended after an error that the program caught.
    """
    if _companions is not None and _companions.children and _companions.ending.is_set():
        raise LaunchError(
            "the other processes of this program were ended after an error",
            expected="all of them to be there",
            do="start the program again, or use a strategy that forks: it starts new processes for every call",
        )
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is None or os.environ.get(PARENT_VARIABLE) == str(os.getpid()) or sys.excepthook is _report_and_exit:
        return
    sys.excepthook = _report_and_exit
    atexit.register(_left(Path(folder), int(os.environ["RANK"])).touch)  # runs after what is registered later
    if sys.platform != "linux":  # elsewhere the launcher had the kernel told before the program began
        die_with(int(os.environ[PARENT_VARIABLE]))


def _left(folder: Path, rank: int) -> Path:
    """Return the file that a process leaves when Python has ended in order: all that follows is tidying up."""
    return folder / f"{rank}.left"


def _ending_code(code: int | None, folder: Path, rank: int) -> int | None:
    """Return `code`, but 0 for a process that was aborted while tidying up.

    A thread that a library of torch's leaves behind can abort a process whose work is done (std::terminate, seen with
    torch 2.13 and gloo about once in thirty runs of a script that never closes its trainer).
    """
    return 0 if code == -signal.SIGABRT and _left(folder, rank).exists() else code


def _report_and_exit(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    folder = Path(os.environ[REPORTS_VARIABLE])
    if isinstance(error, KeyboardInterrupt):
        return
    if folder.exists():
        report(error, int(os.environ.get("RANK", "0")), folder)
    else:
        sys.__excepthook__(kind, error, trace)


def tell_launcher(error: BaseException, rank: int) -> None:
    """Leave the report of `error` for the launcher of this process, or print it where there is none to read it."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is not None and os.path.isdir(folder) and os.environ.get(PARENT_VARIABLE) != str(os.getpid()):
        report(error, rank, Path(folder))
    else:
        traceback.print_exception(error)


def root_cause(folder: Path, children: Iterable[Child]) -> StratagemError | None:
    """Return the error to show for what happened, made from the reports and the exit codes; None if nothing did."""
    reports = sorted((_read(path) for path in folder.glob("*.json")), key=lambda report: report.time)
    known = {found.rank for found in reports}
    silent = [c for c in children if c.poll() not in (None, 0) and not c.was_ended and c.rank not in known]
    roots = [found for found in reports if not found.is_echo]
    if roots:
        return _as_error(roots[0])
    if silent:
        child = silent[0]
        return LaunchError(
            f"rank {child.rank} {_ending(child.poll())} and left no error report",
            do="check its stderr, and the kernel log for an out-of-memory kill",
        )
    return _as_error(reports[0]) if reports else None


def _read(path: Path) -> Report:
    return Report(**json.loads(path.read_text()))


def _as_error(found: Report) -> StratagemError:
    note = f"on rank {found.rank}:\n{found.traceback.rstrip()}"
    cls = getattr(errors, found.type, None)
    if found.parts and isinstance(cls, type):
        error: StratagemError = cls(found.parts["found"], expected=found.parts["expected"], do=found.parts["do"])
    else:
        error = LaunchError(f"rank {found.rank} failed with {found.type}: {found.message}", do="its traceback is below")
    error.add_note(note)
    return error


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


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
        # The others notice by themselves, most of the time; their reports may hold the cause.
        _wait_until(lambda: _root_is_known(folder) or all(c.poll() is not None for c in children), NOTICE_S)
    finally:
        end(children)
    reports = [_read(path) for path in folder.glob("*.json")]
    codes = {each.message if each.type == SystemExit.__name__ else "" for each in reports}
    if len(reports) == len(children) and len(codes) == 1 and (code := codes.pop()).isdecimal():
        raise SystemExit(int(code))  # they left in agreement
    cause = root_cause(folder, children)
    assert cause is not None, "a process failed"
    raise cause


def _root_is_known(folder: Path) -> bool:
    reports = [_read(path) for path in folder.glob("*.json")]
    # Who leaves by sys.exit may do so in agreement with the others: they get the time to do the same.
    return any(not (each.is_echo or each.type == SystemExit.__name__) for each in reports)


class Companions:
    """The other processes of this node, beside a parent that is one of the ranks itself."""

    def __init__(self, children: list[tuple[int, subprocess.Popen[bytes]]], folder: Path, store: Any) -> None:
        self.children = [
            Child(rank, process.pid, lambda rank=rank, process=process: _ending_code(process.poll(), folder, rank))  # type: ignore[misc]
            for rank, process in children
        ]
        self.folder, self.store = folder, store
        self.ending = threading.Event()
        #: A watcher interrupted the main thread: the next KeyboardInterrupt is not the user's.
        self.told = False
        self._owner = os.getpid()
        for rank, process in children:
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        atexit.register(self._at_exit)
        self._earlier_hook, sys.excepthook = sys.excepthook, self._excepthook
        global _companions
        _companions = self

    def run(self, main: Callable[[], Any]) -> Any:
        """Call `main` as this process's part; an error that another process caused becomes that process's error."""
        try:
            return main()
        except BaseException as error:
            forked = self._owner != os.getpid()  # a copy of this process must not end its original's companions
            cause = None if forked else self._settle(error)
            if cause is None:
                raise
            raise cause from None

    def _settle(self, error: BaseException) -> BaseException | None:
        """End everybody after `error` here; return the error of another process if that one was the cause."""
        told = self.told and isinstance(error, KeyboardInterrupt)
        if echo := is_echo(error):
            _wait_until(lambda: _root_is_known(self.folder) or self._someone_failed(), NOTICE_S)
            _wait_until(lambda: _root_is_known(self.folder), 0.5)
        self.ending.set()
        end(self.children)
        return root_cause(self.folder, self.children) if echo or told else None

    def _someone_failed(self) -> bool:
        return any(child.poll() not in (None, 0) for child in self.children)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """When a companion dies and this process does not notice, tell it; if it is stuck, end it."""
        if _ending_code(process.wait(), self.folder, rank) == 0 or self.ending.wait(NOTICE_S):
            return
        self.told = True
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
        """Wait for the companions after a normal end; end them after an exception."""
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


_companions: Companions | None = None


def _interrupt_main_thread() -> None:
    """As Ctrl-C would, also out of a sleep or another wait of the system's; nothing if the program ignores that."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _leave_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def reports_folder() -> Path:
    """Return a new folder for reports and results, readable by this user alone."""
    return Path(tempfile.mkdtemp(prefix="stratagem-"))
