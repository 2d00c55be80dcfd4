"""Launch the processes of this node: run the program again, or call a function in spawned or forked processes."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define

from stratagem.api import DEVICE_CUDA, Launcher, hookimpl
from stratagem.api.notebook import in_notebook
from stratagem.distributed.default_group import leave_group
from stratagem.distributed.launched import die_with, report
from stratagem.distributed.process_variables import PARENT_VARIABLE, process_variables
from stratagem.distributed.rendezvous import reserve_store
from stratagem.distributed.standard_streams import flush_files
from stratagem.errors import ConfigError
from stratagem_evidence import EVIDENCE_VARIABLE, clear
from stratagem_launchers_local.children import Child, child_environment, end, local_places
from stratagem_launchers_local.finalization import shorten_finalization
from stratagem_launchers_local.hydra_job import FULL_ERROR_VARIABLE, hydra_job, job_arguments
from stratagem_launchers_local.relaunch import relaunch_command
from stratagem_launchers_local.reports import left, reports_folder
from stratagem_launchers_local.supervision import (
    LocalWorkers,
    ending_on_sigterm,
    forget_signals,
    holding_signals,
    report_to_launcher,
    start_for_good,
    wait_for,
)

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Set while a spawned process imports the user's script: a launch then means that the script has no main guard.
_IMPORTING = "STRATAGEM_IMPORTING_MAIN"


@define(eq=False, kw_only=True)
class _LocalLauncher(Launcher):
    """Has each process of a run report the error that ends it, and end sooner."""

    def enter_process(self) -> None:
        report_to_launcher()

    @hookimpl
    def on_connect(self) -> None:
        shorten_finalization()


@define(eq=False, kw_only=True)
class SubprocessLauncher(_LocalLauncher):
    """Runs the program again for each other process of this node; the process that you started is local rank 0.

    All processes live to the end of the program, so a script may fit, then test, then fit another model.
    """

    parent_trains = True

    @hookimpl
    def launch(self, main: Callable[[], Any], run: RunContext) -> Any:
        assert run.world is not None, "a launcher starts the processes of a world"
        alone = run.world.local_world_size == 1
        job = None if alone else hydra_job()
        command = [] if alone else relaunch_command()
        world, store = reserve_store(run.world)
        first, *others = local_places(world)
        folder = reports_folder()
        preexec = _ending_with(os.getpid())
        children: list[tuple[int, subprocess.Popen[bytes]]] = []

        def start() -> None:
            for place in others:
                environment, words, cwd = child_environment(place, folder), command, None
                environment[EVIDENCE_VARIABLE] = str(folder)
                if job is not None:
                    environment[FULL_ERROR_VARIABLE] = "1"
                    words, cwd = [*command, *job_arguments(job, place.rank)], job.runtime.cwd
                process = subprocess.Popen(words, cwd=cwd, env=environment, preexec_fn=preexec)
                children.append((place.rank, process))

        try:
            start_for_good(start)
            store.serve()
        except BaseException:
            store.close()
            end([Child(rank, process.pid, process.poll) for rank, process in children])
            clear(folder)
            raise
        os.environ.update(process_variables(first), **{EVIDENCE_VARIABLE: str(folder)})
        return LocalWorkers(children, folder, store).run(main)


def _ending_with(parent: int) -> Callable[[], None] | None:
    return functools.partial(die_with, parent) if sys.platform == "linux" else None


@define(eq=False, kw_only=True)
class _FunctionLauncher(_LocalLauncher):
    """Calls the training function in new processes, and returns rank 0's result."""

    parent_trains = False
    start_method: ClassVar[str]

    @hookimpl
    def launch(self, main: Callable[[], Any], run: RunContext) -> Any:
        assert run.world is not None, "a launcher starts the processes of a world"
        shorten_finalization()
        self._prepare(run)
        main = self._pack(main)
        self._start_helpers()
        world, store = reserve_store(run.world)
        folder = reports_folder()
        context: Any = multiprocessing.get_context(self.start_method)  # typeshed's base class has no Process
        children: list[Child] = []
        try:
            with ending_on_sigterm():
                with _variable(_IMPORTING, str(folder)):
                    for place in local_places(world):
                        variables = child_environment(place, folder) | {EVIDENCE_VARIABLE: str(folder)}
                        process = context.Process(
                            target=_child, args=(main, variables, folder, place.rank, self.start_method)
                        )
                        with holding_signals():
                            process.start()
                            children.append(Child(place.rank, process.pid, _exit_code(process)))
                store.serve()
                wait_for(children, folder)
                return read_result(folder)
        finally:
            end(children)  # also if a process could not be started
            store.close()
            clear(folder)

    def _prepare(self, run: RunContext) -> None:
        """Raise an error if processes cannot be started in this way; before a fork, do once what each would have to."""

    def _pack(self, main: Any) -> Any:
        return main

    def _start_helpers(self) -> None:
        """Start processes of Python's own that the first start of a process would start."""


@define(eq=False, kw_only=True)
class SpawnLauncher(_FunctionLauncher):
    """Starts new interpreters, which import the script: it needs ``if __name__ == "__main__":``. All must pickle."""

    start_method = "spawn"

    def _start_helpers(self) -> None:
        # Starting it unblocks the signals that `holding_signals` holds.
        resource_tracker.ensure_running()

    def _prepare(self, run: RunContext) -> None:
        folder = os.environ.get(_IMPORTING)
        if folder is not None:
            error = ConfigError(
                "the script starts processes while it is being imported by one of them",
                expected='its main part under `if __name__ == "__main__":`',
                do="indent it under that line, as a spawned process imports the script",
            )
            report(error, 0, Path(folder))
            raise error

    def _pack(self, main: Any) -> bytes:
        # Plain pickle, not torch.multiprocessing's: that one would share the parameters' memory between the ranks.
        packed = io.BytesIO()
        pickler = _Pickler(packed)
        try:
            pickler.dump(main)
        except Exception as error:
            raise ConfigError(
                f"the module, a callback or a loader cannot be sent to a spawned process ({error})",
                expected="everything to pickle",
                do='define it at the top of a module, or use a strategy that forks or runs the script again ("ddp")',
            ) from error
        if pickler.of_main and getattr(sys.modules["__main__"], "__file__", None) is None:
            raise ConfigError(
                f"{', '.join(sorted(pickler.of_main))} is defined in a notebook, at a prompt or in `python -c`, where "
                "a spawned process cannot import it",
                expected="all classes and functions of the run in modules",
                do='move it to a .py file and import it, or use a strategy that forks (such as "ddp_notebook")',
            )
        return packed.getvalue()


class _Pickler(pickle.Pickler):
    """Collects the classes and functions of the main program in what it pickles: only their names are sent."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            self.of_main.add(value.__qualname__)
        return NotImplemented


@define(eq=False, kw_only=True)
class ForkLauncher(_FunctionLauncher):
    """Forks this process, which takes a fraction of a second; objects need not pickle. For notebooks and tests."""

    start_method = "fork"

    def _prepare(self, run: RunContext) -> None:
        import torch._dynamo  # noqa: F401 - the first optimizer step imports it, which takes seconds

        if in_notebook():
            print(
                "the processes are forks of this notebook's kernel: a notebook has no script to run again", flush=True
            )
        run.stack.preload()
        # After the imports, which may initialize the CUDA driver.
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError("launcher 'fork' does not exist on this system", expected="'spawn' or 'subprocess'")
        uses_cuda = DEVICE_CUDA in run.accelerator.capabilities.provides
        if uses_cuda and not _forks_can_initialize_cuda():
            raise ConfigError(
                "launcher 'fork' was chosen and this process already uses CUDA",
                expected="a process that has neither used a CUDA device nor called torch.cuda.is_available(): "
                "otherwise a forked process cannot initialize CUDA",
                do="restart the notebook, create no tensor on a GPU before fit and set PYTORCH_NVML_BASED_CUDA_CHECK=1 "
                "before torch is imported, or use another launcher",
            )


def _forks_can_initialize_cuda() -> bool:
    """Try it in a forked process: in this one torch does not tell whether the CUDA driver is initialized."""
    import torch

    if torch.cuda.is_initialized():
        return False
    copy = multiprocessing.get_context("fork").Process(target=_exit_with_answer)
    copy.start()
    copy.join()
    return copy.exitcode == 0


def _exit_with_answer() -> None:
    import torch

    os._exit(int(torch.cuda._is_in_bad_fork()))


def _child(main: Any, variables: dict[str, str], folder: Path, rank: int, start_method: str) -> None:
    """Call `main` in a launched process; write its result, or a report of its error, to `folder`."""
    forget_signals()
    die_with(int(variables[PARENT_VARIABLE]))
    os.environ.update(variables)
    os.environ.pop(_IMPORTING, None)
    try:
        import torch

        if start_method == "fork":
            leave_group()  # that of an earlier run, which the parent has not closed
            # A thread pool does not survive a fork: the first parallel operation would wait for it forever.
            torch.set_num_threads(1)
        result = (pickle.loads(main) if isinstance(main, bytes) else main)()  # noqa: S301 - the parent sent it
        if variables["LOCAL_RANK"] == "0":
            torch.save(result, folder / "result.pt")
    except KeyboardInterrupt:
        _flush_and_exit(130)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            report(stop, rank, folder)
            _flush_and_exit(1)
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises it
        report(error, rank, folder)
        _flush_and_exit(1)
    else:
        left(folder, rank).touch()
    if start_method == "fork":  # which ends without closing files
        flush_files()


def _flush_and_exit(code: int) -> None:
    flush_files()
    os._exit(code)


def read_result(folder: Path) -> Any:
    import torch

    if not (folder / "result.pt").exists():
        raise SystemExit(0)  # rank 0 called sys.exit in `main`: do the same here
    # Written by our own process into a folder that only this user can write to.
    return torch.load(folder / "result.pt", map_location="cpu", weights_only=False)


def _exit_code(process: Any) -> Callable[[], int | None]:
    return lambda: process.exitcode


class _variable:  # noqa: N801 - reads as a statement
    """Set an environment variable for the duration of a block."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value

    def __enter__(self) -> None:
        os.environ[self.name] = self.value

    def __exit__(self, *_: object) -> None:
        os.environ.pop(self.name, None)
