"""A Python process that has imported the modules of scripts, and forks a copy of itself for each script.

Started by `programs.scripts`, which sends it requests. A copy runs the script as ``python script.py``: a new
``__main__``, its arguments, working folder, environment and streams, and the interpreter's own shutdown.

[Note: one thread]
A copy has only the thread that forked it. A lock that another thread of the server held would stay locked in the copy,
so the server has no other thread: nothing that starts one may be imported here (`serve` checks).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import itertools
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any, cast

from programs.script_children import NUMBER, read_request, serve_children
from stratagem.distributed.standard_streams import flush_files

#: How many bytes of the server's command line a copy may overwrite with its own.
PADDING = 8000
#: Pickled: what a program has to call before it runs.
_NOTHING = pickle.dumps(None)

#: Whether this process ends with the signal of Ctrl-C.
_interrupted = False


def serve(control: int, preload: list[str], own_folder: str) -> None:
    """Import those of `preload` that are installed; fork for each request that arrives at the socket `control`.

    Removes `own_folder`, in which this package is, from the path on which scripts find modules.

    Returns when that is closed. In a fork this runs the script and returns, or raises SystemExit, so that the
    interpreter ends in its usual way.

    Raises:
        RuntimeError: an import started a thread.
    """
    environment = dict(os.environ)
    atexit.register(_end)  # the first to be registered is the last to be called
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which close the socket
    for name in preload:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    sys.path.remove(own_folder)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"importing {preload} started {len(threads) - 1} threads; expected none")
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=control)
    request = _next_request(requests, environment)
    if request is not None:
        signal.signal(signal.SIGINT, interrupt)
        requests.detach()  # closed already
        if before := pickle.loads(request.get("before", _NOTHING)):
            before()
        _run(request)


def _next_request(requests: socket.socket, environment: dict[str, str]) -> dict[str, Any] | None:
    """Fork for each request: return it in the fork. Return None in the server, when there are no more."""
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select((requests.fileno(), awake), (), ())
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 1024)
            _report_ended(running)
        if requests.fileno() not in ready:
            continue
        received = read_request(requests, 4)
        if received is None:
            return None
        request, (*streams, answer) = received
        child = os.fork()
        if not child:
            return _become(request, streams, answer, environment)
        running[child] = answer
        for descriptor in streams:
            os.close(descriptor)


def _report_ended(running: dict[int, int]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        answer = running.pop(child)
        with contextlib.suppress(BrokenPipeError):  # no process waits for it any longer
            os.write(answer, NUMBER.pack(status))
        os.close(answer)


def _become(request: dict[str, Any], streams: list[int], answer: int, environment: dict[str, str]) -> dict[str, Any]:
    """Put this fork in the state of an interpreter before it runs a program; return the program of the request."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["new_session"]:
        os.setsid()
    os.write(answer, NUMBER.pack(os.getpid()))  # from now on its group can be signalled
    request, streams = serve_children(environment) or (request, streams)
    _take(streams, request.get("numbers", [0, 1, 2]))
    signal.pthread_sigmask(signal.SIG_BLOCK, request.get("mask", ()))
    os.chdir(request["cwd"])
    _set_environment(request["env"])
    _set_command_line(request)
    cast("io.TextIOWrapper", sys.stdout).reconfigure(
        line_buffering=os.isatty(1), write_through=True if request["unbuffered"] else None
    )
    _forget_the_server()
    return request


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Give `descriptors` the `numbers`, in ascending order, and close all others."""
    free = max(*descriptors, *numbers) + 1
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD, free) for each in descriptors]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    for number, following in itertools.pairwise([*numbers, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(number + 1, following)


def _set_environment(variables: dict[str, str]) -> None:
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_command_line(request: dict[str, Any]) -> None:
    """Write the script's command and its own variables to the process's command line, as ps shows it."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        end = int(file.read().rpartition(")")[2].split()[46])  # arg_end, see proc(5)
    text = "\0".join([*request["command"], *request["own_variables"]]).encode()[:PADDING]
    ctypes.memmove(end - 1 - PADDING, text.ljust(PADDING, b"\0"), PADDING)


def _forget_the_server() -> None:
    """Reset what modules read from the server process when they were imported."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the module random does so itself
    tempfile.tempdir = None
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def _run(request: dict[str, Any]) -> None:
    """Run the program, and pass an exception to the hooks that the interpreter would call."""
    global _interrupted
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.orig_argv[:] = request["command"]
    kind, program, arguments = request["program"]
    sys.argv[:] = [program if kind == "file" else f"-{kind}", *arguments]
    sys.path[1:] = dict.fromkeys([*request["path"], *sys.path[1:]])  # as the module site does
    try:
        if kind == "m":
            sys.path[0] = os.getcwd()
            runpy._run_module_as_main(program)  # type: ignore[attr-defined]
        elif kind == "c":
            sys.path[0] = ""
            main.__loader__ = BuiltinImporter
            exec(compile(program, "<string>", "exec"), main.__dict__)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
            main.__file__ = os.path.join(os.getcwd(), program)
            main.__loader__ = SourceFileLoader("__main__", main.__file__)
            main.__cached__ = None  # type: ignore[attr-defined]
            with open(program, "rb") as file:
                source = file.read()
            exec(compile(source, main.__file__, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, own
        sys.excepthook(type(error), error.with_traceback(own), own)
        _interrupted = isinstance(error, KeyboardInterrupt)
        raise SystemExit(1) from None


def _end() -> None:
    """Write what the script left in open files: the interpreter would close them, if the server had frozen nothing.

    End with the signal, as the interpreter does after a KeyboardInterrupt, so that a shell detects it.
    """
    flush_files()
    if _interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
