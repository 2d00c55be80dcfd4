"""Run a function in several gloo processes: a quarter of a second for two, since they fork from this process.

Independent of stratagem's launchers, so that these are tested against something else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.distributed.default_group import leave_group
from stratagem.distributed.rendezvous import RendezvousStore
from stratagem.distributed.standard_streams import flush_files
from stratagem.errors import is_echo

#: The variables in which launchers pass ranks to processes.
LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

#: Packages that stratagem imports when a run is made.
_LIGHT = {"attrs", "cattrs", "packaging", "pluggy", "yaml"}
#: Modules that forked processes have imported, and this one has not.
_imported: set[str] = set()
_ENDED = "ended with"
#: Seconds in which the other ranks may write their errors after one has failed.
_REPORT_GRACE_S = 0.3


class ProcessesFailed(AssertionError):
    """A rank raised an error, was killed, or timed out. The message begins with the cause and its traceback."""


def run_in_processes(function: Callable[..., Any], world_size: int, *arguments: Any, limit_s: float = 360) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in each process; return the results in rank order.

    The processes find the variables of an external launcher (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
    compute on one thread, and are gone when this returns. They are forked, so `function` and `arguments` need not be
    picklable; results must be.

    Raises:
        ValueError: `world_size` is not positive.
        ProcessesFailed: a rank raised an error or was killed, or ran longer than `limit_s` seconds (stacks are in
            the text); all of them were ended.
    """
    __tracebackhide__ = True
    import torch
    import torch._dynamo

    _import_what_children_imported()
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected at least one process")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stratagem-test-") as name:
        return _run_in(Path(name), function, world_size, arguments, limit_s)


def _run_in(
    folder: Path, function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], limit_s: float
) -> list[Any]:
    __tracebackhide__ = True
    (folder / "evidence").mkdir()
    store = RendezvousStore()  # in this process, as in a launcher: it survives a rank that is killed
    children = [_fork(function, rank, world_size, store.port, folder, arguments) for rank in range(world_size)]
    try:
        store.serve()
        failed = _wait(children, time.monotonic() + limit_s)
        _note_imports(folder)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        store.close()
    if failed:
        raise ProcessesFailed("\n".join(_failure(failed, folder, world_size)))
    results = [folder / f"{rank}.result" for rank in range(world_size)]
    silent = [rank for rank, path in enumerate(results) if not path.exists()]
    if silent:
        raise ProcessesFailed(f"ranks {silent} left without a result (os._exit?)")
    return [pickle.loads(path.read_bytes()) for path in results]  # noqa: S301 - our own bytes


def _note_imports(folder: Path) -> None:
    """Note what the processes have imported, of packages that this process has imported too, and of stratagem's."""
    with contextlib.suppress(OSError):
        names = [name for name in json.loads((folder / "imports").read_text()) if _is_harmless(name)]
        roots = {root for name in names if (root := name.partition(".")[0]) not in sys.modules}
        own = {root for root in roots if root.startswith("stratagem") or root in sys.stdlib_module_names}
        if roots <= own | _LIGHT:  # what else came with them is for the processes that need it
            _imported.update(names)
        else:
            _imported.update(name for name in names if name.partition(".")[0] not in roots)


def _is_harmless(name: str) -> bool:
    """Whether a module may be imported earlier than its package would: torch's compiler depends on the order."""
    return not name.startswith("torch.") or name.startswith("torch.distributed.")


def _import_what_children_imported() -> None:
    """Import it here, once: each process that is forked would import it again, which takes longer than training."""
    while _imported:
        with contextlib.suppress(Exception):  # a module that a test has written, or one without a file
            importlib.import_module(_imported.pop())


def _fork(
    function: Callable[..., Any], rank: int, world_size: int, port: int, folder: Path, arguments: tuple[Any, ...]
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code, before = 1, set(sys.modules)
    try:
        import torch

        leave_group()  # that of a run that the parent has not closed
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1, open(folder / f"{rank}.stack", "w"), all_threads=True)  # noqa: SIM115
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
            STRATAGEM_EVIDENCE=str(folder / "evidence"),
            STRATAGEM_STORE_HOSTED="1", TORCHELASTIC_USE_AGENT_STORE="True",  # for stratagem, and for torch's env://
        )  # fmt: skip
        result = function(rank, world_size, *arguments)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        if rank == 0:
            (folder / "imports").write_text(json.dumps(sorted(set(sys.modules) - before)))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        echo = is_echo(error)
        text, said = traceback.format_exc(), traceback.format_exception_only(error)
        report = {"time": time.time(), "echo": echo, "text": text, "error": said[-1].partition("\n")[0]}
        (folder / f"{rank}.error").write_text(json.dumps(report))
    finally:
        flush_files()
        os._exit(code)


def _wait(children: list[int], deadline: float) -> str:
    """Return what failed, or an empty string."""
    waiting = dict(enumerate(children))
    while waiting:
        for rank, child in list(waiting.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del waiting[rank]
                code = os.waitstatus_to_exitcode(status)
                if code:
                    time.sleep(_REPORT_GRACE_S)
                    return f"rank {rank} {_ENDED} {code}"
        if time.monotonic() > deadline:
            for child in waiting.values():  # each writes its stack, see _fork
                os.kill(child, signal.SIGUSR1)
            time.sleep(_REPORT_GRACE_S)
            late = sorted(waiting)
            return (
                f"ranks {late} were still running at the time limit, `limit_s`: do all ranks call the same collectives?"
            )
        time.sleep(0.005)
    return ""


def _failure(failed: str, folder: Path, world_size: int) -> list[str]:
    """Return what failed, and the tracebacks of all ranks: the cause first, ranks that failed by it in one line."""
    reports, stacks = {}, {}
    for rank in range(world_size):
        with contextlib.suppress(OSError, ValueError):
            stacks[rank] = (folder / f"{rank}.stack").read_text()
            reports[rank] = json.loads((folder / f"{rank}.error").read_text())
    order = sorted(reports, key=lambda rank: (reports[rank]["echo"], reports[rank]["time"]))
    if order and failed.endswith(f"{_ENDED} 1"):  # the code of a process that has reported an error
        failed = f"rank {order[0]} raised {reports[order[0]]['error']}"
    lines = [failed]
    for place, rank in enumerate(order):
        text = reports[rank]["text"].strip()
        lines.append(f"--- rank {rank}\n{text if place == 0 or not reports[rank]['echo'] else text.splitlines()[-1]}")
    return lines + [f"--- rank {rank}, where it was\n{_own_frames(text)}" for rank, text in stacks.items() if text]


def _own_frames(stack: str) -> str:
    """Return a dumped stack without the frames of the parent, which are equal on all ranks."""
    return "\n".join(thread.split(f'  File "{__file__}"')[0].rstrip() for thread in stack.split("\n\n"))
