"""Replacements of `subprocess.run` and `subprocess.Popen` that run scripts without the four seconds to import torch.

    from stratagem_testing import scripts

    done = scripts.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=60)

The first call starts a process that imports torch, the compiler that its optimizers import, and stratagem; each script
runs in a fork of it, with ``__main__``, arguments, folder, environment, streams, signals and exit codes as under
``python train.py``. Set OMP_NUM_THREADS=1 for the tests: forks need a process with one thread.

Other commands run as under `subprocess`: those that are not Python programs, that set options of the interpreter, or
that set variables which torch may read while it is imported; so do the commands that a script starts. Tests of start-up
itself (what is imported when) should use `subprocess`.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem_testing.processes import LAUNCH_VARIABLES
from stratagem_testing.script_server import LENGTH, NUMBER, PADDING

#: Modules that scripts import, and modules that torch and stratagem import on first use.
PRELOAD = (
    "torch", "torch._dynamo", "stratagem.training.trainer", "stratagem.training.stage_runner", "stratagem.cli",
    "stratagem_testing.reference",
)  # fmt: skip

#: Variables that nothing in PRELOAD reads while it is imported. Where any other one differs from those of the server,
#: it might have made a difference. (scikit-learn, torch's compiler, DeepSpeed and MLflow set the last five where they
#: are imported.)
_READ_LATE = (
    *LAUNCH_VARIABLES, "COLUMNS", "LINES", "PWD", "OLDPWD", "SHLVL", "_", "NO_COLOR", "TERM", "TMPDIR",
    "CUBLAS_WORKSPACE_CONFIG", "DS_ACCELERATOR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "_MLFLOW_TELEMETRY_SESSION_ID",
)  # fmt: skip
_READ_LATE_PREFIXES = ("STRATAGEM_", "PYTEST_", "TORCHELASTIC_", "GLOO_", "NCCL_", "SLURM_")

_SERVE = "import sys; from stratagem_testing.script_server import serve; serve(int(sys.argv[1]), sys.argv[2].split())"


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
        # The order is that of Python 3.11 to 3.14.
        command, executable, preexec_fn, close_fds, pass_fds, cwd, env = arguments[:7]
        shell, pipes = arguments[9], arguments[10:16]
        unusual = executable or preexec_fn or not close_fds or pass_fds or shell or not arguments[16]
        others = (*((each, None) for each in arguments[17:20]), (arguments[20], -1), (arguments[22], -1))
        request = None
        if not unusual and all(value in (None, usual) for value, usual in others):
            request = _request(command, cwd, env, arguments[21])
        if request is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._answers = _the_server().start(request, streams)
        try:
            self.pid = _number(self._answers)
        except EOFError:
            os.close(self._answers)
            raise
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

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
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, number, " ".join(PRELOAD), " " * PADDING],
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
        content = pickle.dumps(request)
        try:
            with self._lock:
                socket.send_fds(self._requests, [LENGTH.pack(len(content))], [*streams, theirs])
                self._requests.sendall(content)
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


def _request(command: Any, cwd: Any, env: Mapping[str, str] | None, new_session: bool) -> dict[str, Any] | None:
    """Return the request for the server; None if the command needs a new interpreter."""
    words = [os.fspath(word) for word in ([command] if isinstance(command, str | os.PathLike) else command)]
    folder = os.path.abspath(cwd or os.getcwd())
    variables = dict(os.environ if env is None else env)
    ours = sys.platform == "linux" and (_server is None or _server.owner == os.getpid())
    if not ours or not os.path.isdir(folder) or not all(isinstance(word, str) for word in words):
        return None
    differing = [name for name in variables | _ENVIRONMENT if variables.get(name) != _ENVIRONMENT.get(name)]
    if variables.get("OMP_NUM_THREADS") != "1" or not all(_is_read_late(name) for name in differing):
        return None
    unbuffered = words[:2] == [sys.executable, "-u"]
    program = _program(words[:1] + words[2:] if unbuffered else words, folder)
    return program and {
        "program": program, "unbuffered": unbuffered, "cwd": folder, "env": variables, "new_session": new_session,
        "command": words if words[0] == sys.executable else [sys.executable, *words],
        "own_variables": [f"{name}={variables[name]}" for name in differing if name in variables],
    }  # fmt: skip


def _is_read_late(name: str) -> bool:
    return name in _READ_LATE or name.startswith(_READ_LATE_PREFIXES)


def _program(words: list[str], folder: str) -> tuple[str, str, list[str]] | None:
    """Return how a Python program is given ("file", "c" or "m"), its name or code, and its arguments."""
    if words[0] == sys.executable and words[1:]:
        words = words[1:]
        if words[0] in ("-c", "-m") and words[1:]:
            return words[0][1], words[1], words[2:]
    elif not _is_script_of_this_environment(words[0]):
        return None
    is_file = not words[0].startswith("-") and os.path.isfile(os.path.join(folder, words[0]))
    return ("file", words[0], words[1:]) if is_file else None


def _is_script_of_this_environment(name: str) -> bool:
    """Whether `name` is a script that pip made from an entry point."""
    path = Path(name)
    if path.parent != Path(sys.executable).parent or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().rstrip() == f"#!{sys.executable}".encode()


def _number(answers: int) -> int:
    content = os.read(answers, NUMBER.size)
    if len(content) < NUMBER.size:
        raise EOFError("the process that forks scripts ended; see its output for the reason")
    return int(NUMBER.unpack(content)[0])
