"""Replacements of `subprocess.run` and `subprocess.Popen` that run scripts without the four seconds to import torch.

    from programs import scripts

    done = scripts.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=180)

The first call starts a process that imports torch, the compiler that its optimizers import, and stratagem; each script
runs in a fork of it, with ``__main__``, arguments, folder, environment, streams, signals and exit codes as under
``python train.py``. Set OMP_NUM_THREADS=1 for the tests: forks need a process with one thread.

Other commands run as under `subprocess`: those that are not Python programs, that set options of the interpreter, or
that set variables which torch may read while it is imported. Commands that a script starts with `subprocess.Popen` run
in forks too (see `programs.script_children`), so the ranks of a launched script need not import torch. Tests
of start-up itself (what is imported when) should use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import starts
from programs.script_children import NUMBER, send_request
from programs.script_requests import request_of
from programs.script_server import PADDING

#: Modules that scripts import, and modules that torch and stratagem import on first use.
PRELOAD = (
    "torch", "torch._dynamo", "stratagem_trainer.trainer", "stratagem_trainer.stage_runner", "stratagem.cli",
    "stratagem_testing.reference", "programs.terminal", "cattrs", "filelock", "packaging.requirements", "tomllib", "xxhash",
    # Plugins that most scripts use, where they are installed:
    "stratagem_accelerators", "stratagem_callbacks.model_checkpoint", "stratagem_callbacks.progress",
    "stratagem_checkpoints.one_file", "stratagem_ddp.strategy", "stratagem_ddp.presets", "stratagem_environments_local",
    "stratagem_fit.commands", "stratagem_fsdp", "stratagem_launchers_local", "stratagem_logger_csv",
    "stratagem_precision", "stratagem_single_device", "stratagem_callbacks.ending", "stratagem_callbacks.finite",
    "stratagem_callbacks.hints", "stratagem_callbacks.interruption", "stratagem_callbacks.signal_watcher",
    "stratagem_callbacks.workers", "stratagem_environments_schedulers", "stratagem_peer_diagnosis",
    "stratagem.runtime.launching", "stratagem_trainer.alternatives", "stratagem_trainer.first_states",
    # `stratagem plan`, and what plans import:
    "stratagem_plan.command", "stratagem_plan.script", "stratagem_plan.variants", "stratagem_parallel.planned",
    "torch.distributed.pipelining", "torch.nn.attention.flex_attention", "torch.utils._sympy.reference",
)  # fmt: skip

#: The folder in which the server finds this package.
_FOLDER = str(Path(__file__).parents[1])
_SERVE = (
    "import sys; control, preload, folder = sys.argv[1:4]; sys.path.append(folder); "
    "from programs.script_server import serve; serve(int(control), preload.split(), folder)"
)


def run(
    command: Sequence[Any],
    *,
    input: Any = None,  # noqa: A002 - as in subprocess
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run` does, in its own session, which is killed at the time limit."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **{"start_new_session": True} | options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill_all()
            raise
        code = process.wait()
    if check and code:
        raise subprocess.CalledProcessError(code, process.args, output=stdout, stderr=stderr)
    return subprocess.CompletedProcess(process.args, code, stdout, stderr)


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` that runs Python programs in a fork of a process that has imported torch."""

    #: Descriptor from which the exit status is read; None if the process is a child of this one.
    _answers: int | None = None
    _ended: int | None = None

    @property
    def is_fork(self) -> bool:
        """Whether the process is a fork of the one that has imported torch."""
        return self._answers is not None

    def kill_all(self) -> None:
        """Kill the process, and its process group if it leads one; wait for the process."""
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if self.poll() is None and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()
        self.wait()

    def _execute_child(self, *arguments: Any) -> None:
        asked = request_of(arguments, _ENVIRONMENT) if _server is None or _server.owner == os.getpid() else None
        before = None if asked is None else _sendable(asked[2])
        if asked is None or before is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        request, streams, _ = asked
        request["before"] = before
        sys.audit(starts.SCRIPT)
        self._answers = _the_server().start(request, streams)
        try:
            self.pid = _number(self._answers)
        except EOFError:
            os.close(self._answers)
            raise
        self._child_created = True
        self._close_pipe_fds(*arguments[10:16])  # type: ignore[attr-defined]

    def _internal_poll(self, **arguments: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(**arguments)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._answers is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if self._ended is None:
            if wait_flags & os.WNOHANG and not select.select([self._answers], [], [], 0)[0]:
                return 0, 0
            try:
                self._ended = _number(self._answers)
            finally:
                os.close(self._answers)
        return self.pid, self._ended


class _Server:
    """The process that has imported the modules of scripts, and forks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair()
        number = str(theirs.fileno())
        with theirs, starts.uncounted():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, number, " ".join(PRELOAD), _FOLDER, " " * PADDING],
                cwd=os.sep, env=_ENVIRONMENT, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

        atexit.register(self._close)

    def _close(self) -> None:
        if self.owner == os.getpid():
            self._requests.close()
            self._process.wait()

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the descriptor from which to read the numbers of the process that runs `request`."""
        mine, theirs = os.pipe()
        try:
            with self._lock:
                send_request(self._requests, request, [*streams, theirs])
        finally:
            os.close(theirs)
        return mine


#: The server's environment: that of this process before any test changed it.
_ENVIRONMENT = dict(os.environ)
_server: _Server | None = None


def _the_server() -> _Server:
    global _server
    if _server is None:
        _server = _Server()
    return _server


def _sendable(preexec_fn: Callable[[], Any] | None) -> bytes | None:
    """Return `preexec_fn` for the process that runs the script; None if only this process can call it."""
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps(preexec_fn)
    return None


def _number(answers: int) -> int:
    content = os.read(answers, NUMBER.size)
    if len(content) < NUMBER.size:
        raise EOFError("the process that forks scripts ended; see its output for the reason")
    return int(NUMBER.unpack(content)[0])
