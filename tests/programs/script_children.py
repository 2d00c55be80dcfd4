"""Run the Python programs that a script starts in forks, too, as children of that script.

[Note: adoption]
A launcher waits for what it starts, and what it starts asks the kernel to die with it: such a process must be a child
of the script, and yet a copy of a process in which no script has run. So each script gets a helper: a child, forked
before the script begins, which waits for requests. For each it forks a process that forks the copy and ends at once;
meanwhile the script is a "child subreaper" (see prctl), to which the kernel gives the orphan.

The helper holds none of the script's files, and dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.util
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from programs.script_requests import request_of, spawn_request

#: A request: its length, then that many bytes of `pickle`, with file descriptors beside the length.
LENGTH = struct.Struct("!I")
#: The answer: a process's id.
NUMBER = struct.Struct("!i")

#: At most so many descriptors come with a request.
_DESCRIPTORS = 64

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def read_request(connection: socket.socket, descriptors: int) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request with its file descriptors; None if the other side has closed the connection."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH.size, descriptors)
    if not head:
        return None
    length, content = LENGTH.unpack(head)[0], bytearray()
    while len(content) < length:
        content += connection.recv(length - len(content))
    return pickle.loads(content), files


def send_request(connection: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> None:
    """Send what `read_request` returns."""
    content = pickle.dumps(request)
    socket.send_fds(connection, [LENGTH.pack(len(content))], descriptors)
    connection.sendall(content)


def serve_children(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[int]] | None:
    """Fork the helper, and start programs through it from now on; to be called before the script runs.

    Returns None in the script's process. Returns again in each process that the script starts: what it shall run, and
    its standard streams.
    """
    script = os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # an abstract address, which is not a file
    listener.listen()
    libc = ctypes.CDLL(None)
    if not os.fork():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return _help(listener, script)
    _start_through(listener.getsockname(), script, libc.prctl, environment)
    listener.close()
    return None


def _help(listener: socket.socket, script: int) -> tuple[dict[str, Any], list[int]]:
    _close_all_but(listener.fileno())
    while os.getppid() == script:
        connection, _ = listener.accept()
        asker = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        asked = read_request(connection, _DESCRIPTORS) if asker == script else None  # not another user of this machine
        between = os.fork() if asked else 0
        if asked and not between:
            helped = os.getpid()
            if os.fork():
                os._exit(0)
            _wait_for_adoption(helped, script)
            if asked[0]["new_session"]:
                os.setsid()
            connection.sendall(NUMBER.pack(os.getpid()))
            return asked
        connection.close()
        if asked:
            os.waitpid(between, 0)
            for descriptor in asked[1]:
                os.close(descriptor)
    os._exit(0)


def _close_all_but(kept: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _wait_for_adoption(first_parent: int, script: int) -> None:
    while (parent := os.getppid()) != script:
        if parent != first_parent:  # the script has ended
            os._exit(1)
        time.sleep(0.0005)


def _start_through(address: bytes, script: int, prctl: Callable[..., int], environment: Mapping[str, str]) -> None:
    """Make `subprocess.Popen`, and the spawn of `multiprocessing`, run Python programs through the helper."""
    with_interpreter = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    spawn_interpreter = multiprocessing.util.spawnv_passfds

    def start(ask: Callable[..., Any], *arguments: Any) -> int | None:
        # A process dies with the thread that started it, and an adopted one with the main thread.
        if os.getpid() == script and threading.current_thread() is threading.main_thread():
            return _adopted(address, prctl, ask(*arguments, environment))
        return None

    def spawn(path: Any, words: Any, passed: Any) -> int:
        pid = start(spawn_request, words, passed)
        return spawn_interpreter(path, words, passed) if pid is None else pid

    def execute_child(process: Any, *arguments: Any) -> None:
        pid = start(request_of, arguments)
        if pid is None:
            with_interpreter(process, *arguments)
            return
        process.pid, process._child_created = pid, True
        process._close_pipe_fds(*arguments[10:16])

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def _adopted(
    address: bytes, prctl: Callable[..., int], asked: tuple[dict[str, Any], list[int], Any] | None
) -> int | None:
    """Return the id of a new child that runs what was `asked`; None if the helper cannot start one."""
    if asked is None:
        return None
    request, streams, before = asked
    with socket.socket(socket.AF_UNIX) as helper, contextlib.suppress(OSError, pickle.PicklingError, AttributeError):
        request["before"] = pickle.dumps(before)
        helper.connect(address)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            send_request(helper, request, streams)
            answer = helper.recv(NUMBER.size)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(NUMBER.unpack(answer)[0]) if answer else None
    return None
