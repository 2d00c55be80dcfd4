"""What environments, launchers and accelerators must do: answer before a run starts, without side effects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import stratagem as sg
from stratagem import World
from stratagem.api import Evidence
from stratagem.api.run_parts import Timeouts
from stratagem.discovery import catalog, registry
from stratagem.stack.construction import make
from stratagem_testing.conformance import Conformance
from stratagem_testing.expectations import expect_equal, expect_refused, expect_weights
from stratagem_testing.processes import LAUNCH_VARIABLES
from stratagem_testing.reference import Net, joined_batches, train_module_plainly
from stratagem_testing.training import QUIET, outcome, train


class _AutoDetected(Conformance):
    """Checks of environments and accelerators, all of which are imported and asked under "auto"."""

    shares_processes = False

    def test_its_module_imports_no_torch(self) -> None:
        """Runs that do not use it would take longer to start."""
        choice = self.choice()
        if choice.entry is None:
            pytest.skip("passed as an instance; this checks the module of an entry point")
        module = choice.entry.value.partition(":")[0]
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"

        imports = subprocess.run([sys.executable, "-c", code], check=False).returncode != 0
        assert not imports, f"{module} imports torch; import it in the methods that need it"


class EnvironmentConformance(_AutoDetected):
    """Asks the environment for this process's rank and world size, with its variables set, missing and invalid.

    class TestMyScheduler(EnvironmentConformance):
        plugin = "my_scheduler"
        variables = {"MY_RANK": "3", "MY_SIZE": "4", ...}
        world = World(rank=3, world_size=4, ...)
    """

    kind = "environment"
    #: The variables that the scheduler sets in one of several processes.
    variables: ClassVar[Mapping[str, str]] = {}
    #: The expected `World`; None only checks that the answer is consistent.
    world: ClassVar[World | None] = None
    #: Those of `variables` that may be missing or have any value.
    optional: ClassVar[Sequence[str]] = ()

    def test_it_detects_itself_with_its_variables_and_changes_nothing(self) -> None:
        environment = self.choice().plugin
        with _variables(self.variables):
            before = dict(os.environ)
            evidence = environment.detect()
            assert dict(os.environ) == before, "`detect` changes the environment; it must only read variables"
        assert evidence is None or isinstance(evidence, Evidence), (
            f"detect() returned {evidence!r}, which is ignored: return a stratagem.api.Evidence, or None"
        )
        if self.variables:
            assert evidence, f"`detect` returned None with `variables`, {dict(self.variables)}; correct one of them"

    def test_its_answers_have_the_right_types(self) -> None:
        environment = self.choice().plugin
        with _variables(self.variables):
            assert isinstance(environment.processes_exist(), bool), "`processes_exist` must return True or False"
            counts = {name: getattr(environment, name)() for name in ("local_processes", "num_nodes")}
        for name, count in counts.items():
            fits = count is None or (isinstance(count, int) and count >= 1)
            assert fits, f"`{name}` returned {count!r}, expected an int from 1, or None if it is not known"

    def test_the_world_makes_sense(self) -> None:
        if not self.variables and self.choice().plugin.detect() is None:
            pytest.skip("it is not detected, and `variables` is not set")
        with _variables(self.variables):
            world = self._world()

        said = f"`setup_environment` returned {world}"
        assert 0 <= world.rank < world.world_size, f"{said}: rank must be below world_size"
        assert 0 <= world.local_rank < world.local_world_size <= world.world_size, f"{said}: local_rank is too large"
        assert 0 <= world.node_rank < world.num_nodes, f"{said}: node_rank must be below num_nodes"
        assert world.num_nodes > 1 or world.local_world_size == world.world_size, f"{said}: one node has all processes"
        if self.world is not None:
            expect_equal("`setup_environment` with `variables`", world, self.world, "correct it, or `world`")

    def test_missing_and_broken_variables_are_named(self) -> None:
        """A ConfigError names the variable; no KeyError is raised."""
        if not self.variables:
            pytest.skip("`variables` is not set")
        for name in self.variables:
            if name in self.optional:
                continue
            broken_ones = [{k: v for k, v in self.variables.items() if k != name}]
            if self.variables[name].isdigit():
                broken_ones.append({**self.variables, name: "x?"})
            for broken in broken_ones:
                with _variables(broken):
                    said = outcome(self._world)
                look = "raise it in `setup_environment`, or add the variable to `optional`"
                expect_refused(f"{name} that is {broken.get(name, 'missing')!r}", said, name, look)

    def _world(self) -> World:
        environment = self.choice().plugin
        size = environment.local_processes() or 1
        world = self.world or World()
        limits = Timeouts(start=timedelta(seconds=10), collective=timedelta(seconds=10))
        settings = SimpleNamespace(num_nodes=world.num_nodes, environment=self.choice().name)
        num_nodes = environment.num_nodes() or world.num_nodes
        stack = SimpleNamespace(num_nodes=num_nodes, timeouts=lambda: limits, devices_given=False)
        run = SimpleNamespace(num_processes=size, settings=settings, stack=stack)
        answer = environment.setup_environment(run=run)
        assert isinstance(answer, World), f"`setup_environment` returned {answer!r}, expected a World"
        return answer


class LauncherConformance(Conformance):
    """Starts real programs through the launcher, on this machine.

    class TestMyLauncher(LauncherConformance):
        plugin = "my_launcher"
    """

    kind = "launcher"
    #: What starts a program: a subclass of `subprocess.Popen` may start it faster.
    popen: ClassVar[type[subprocess.Popen[str]]] = subprocess.Popen

    def test_every_process_has_its_place(self, several: int) -> None:
        """Each of the ranks 0 to n-1 has its own process, and rank 0's result is returned."""
        code, output, errors, _ = self._script(
            several,
            """
            def main(run):
                from stratagem.api.world import World
                places = run.collectives.all_gather_object((run.world.rank, run.world.local_rank, os.getpid()))
                return places if run.rank == 0 else "not mine"
            print("RESULT", run.launch(main), flush=True) if "LOCAL_RANK" not in os.environ else run.launch(main)
            """,
        )
        expect_equal("exit code of a program that launches", code, 0, f"its errors: {errors}")
        lines = [line for line in output.splitlines() if line.startswith("RESULT")]
        expect_equal("processes in which `launch` returned", len(lines), 1, f"the output is {output}")
        ranks = eval(lines[0].removeprefix("RESULT "))  # noqa: S307 - our own program printed it
        found, wanted = [each[:2] for each in ranks], [(rank, rank) for rank in range(several)]
        expect_equal("rank and local rank of each process that `launch` started", found, wanted)
        expect_equal("processes that `launch` started", len({pid for *_, pid in ranks}), several)

    def test_an_error_ends_all_and_is_shown_once(self, several: int) -> None:
        """An error of the last rank, for which rank 0 waits, ends all processes with an exit code that is not 0."""
        code, _, errors, folder = self._script(
            several,
            """
            def main(run):
                if run.rank == run.world_size - 1:
                    raise ValueError("out of order")
                run.collectives.barrier()
            run.launch(main)
            """,
        )
        assert code != 0, f"a rank raised an error, and the program ended with 0; raise it in `launch`:\n{errors}"
        assert "out of order" in errors, f"`launch` must raise a rank's error, 'out of order'; found:\n{errors}"
        assert errors.count("Traceback") <= 2, f"more than the root error is shown; leave out what it caused:\n{errors}"
        deadline = time.monotonic() + 60
        while (left := _processes_with(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"processes {left} still run a minute after an error; end all in `launch`"

    def test_lines_in_open_files_are_written(self, several: int) -> None:
        """What a process wrote to a file that it did not close is in the file after its end, and after its error."""
        every = [str(rank) for rank in range(several)]
        for raiser, complete in ((several, every), (several - 1, every[-1:])):  # an error ends the other processes
            with tempfile.TemporaryDirectory(prefix="stratagem-launch-") as folder:
                code, _, errors, _ = self._script(
                    several,
                    f"""
                    kept = []
                    def main(run):
                        kept.append(open({folder!r} + f"/{{run.rank}}", "w"))
                        kept[0].write("a line")
                        if run.rank == {raiser}:
                            raise ValueError("out of order")
                        run.collectives.barrier()
                    run.launch(main)
                    """,
                )
                assert (code == 0) == (raiser == several), f"a program with `launch` ended with {code}: {errors}"
                written = {name: (Path(folder) / name).read_text() for name in complete}
            look = f"where rank {raiser} of {several} raises an error: flush files before os._exit"
            expect_equal("files that ranks left open", written, dict.fromkeys(complete, "a line"), look)

    def _script(self, processes: int, body: str) -> tuple[int, str, str, str]:
        """Run a program that launches; return exit code, output, errors, and a text in its processes' command lines."""
        choice = self.choice()
        if choice.entry is None:
            pytest.skip("passed as an instance; a separate program needs the plugin by name")
        strategy = catalog.default("strategy_distributed")
        with tempfile.TemporaryDirectory(prefix="stratagem-launch-") as folder:
            path = Path(folder) / "program.py"
            head = f"""
            import os
            import stratagem as sg
            run = sg.Run(strategy={strategy!r}, accelerator={self.accelerator!r}, devices={processes},
                         launcher={choice.entry.qualified_name!r})
            """
            define, _, call = textwrap.dedent(body).strip().rpartition("\n")
            path.write_text(f'{textwrap.dedent(head).strip()}\n{define}\nif __name__ == "__main__":\n    {call}\n')
            clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
            with self.popen(
                [sys.executable, str(path)], env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    output, errors = process.communicate(timeout=self.limit_s)
                except BaseException:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise
            return process.returncode, output, errors, folder


class AcceleratorConformance(_AutoDetected):
    """Counts the devices, and trains on one if this machine has any.

    class TestMyDevice(AcceleratorConformance):
        plugin = "my_device"
        tolerance = 1e-4
    """

    kind = "accelerator"
    #: Largest relative difference of any weight from the CPU, after a few steps in fp32.
    tolerance: ClassVar[float] = 1e-4

    def choose(self, **arguments: Any) -> dict[str, Any]:
        return {"accelerator": self.plugin} | arguments

    def test_counts_without_starting_the_driver(self) -> None:
        """Under "auto" it is asked in the parent of forked processes, which could not use an initialized driver."""
        accelerator, started = self._plugin(), torch.cuda.is_initialized()
        count = accelerator.count()

        assert isinstance(count, int), f"`count` returned {count!r}, expected an int"
        assert count >= 0, f"`count` returned {count}, expected 0 where this machine has no such device"
        expect_equal("torch.cuda.is_initialized() after `count`", torch.cuda.is_initialized(), started)

    def test_provides_its_device(self) -> None:
        accelerator = self._plugin()
        device = accelerator.device(0)

        assert isinstance(device, torch.device), f"`device` returned {device!r}, expected a torch.device"
        word, known = f"device:{device.type}", torch.distributed.Backend.backend_list
        assert word in accelerator.capabilities.provides, f"`device` is {device}; `capabilities` must provide {word!r}"
        assert accelerator.backend in known, f"`backend` is {accelerator.backend!r}, expected one of {known}"

    def test_trains_as_the_cpu_does(self) -> None:
        self._need_a_device()
        batches = joined_batches(6, 24)
        results = self.run_in(train, 1, Net, batches, QUIET | self.choose(devices=1))

        reference, look = train_module_plainly(Net(), batches)[0], "look at what moves tensors to `device`"
        expect_weights(results[0]["weights"], reference, "the CPU", self.tolerance, look, "tolerance")

    def test_more_devices_than_there_are_are_refused(self) -> None:
        self._need_a_device()
        accelerator = self._plugin()
        if not accelerator.indexed:
            pytest.skip("its devices have no numbers")
        more = accelerator.count() + 1
        expect_refused(
            f"{more} devices", outcome(lambda: sg.Run(**self.choose(devices=more))), str(more), "see `count`"
        )

    def _plugin(self) -> Any:
        if not isinstance(self.plugin, str):
            return self.choice().plugin
        return make(registry.find("accelerator", self.plugin), {})  # also on machines without such a device

    def choice(self) -> Any:
        self._need_a_device()
        return super().choice()

    def _need_a_device(self) -> None:
        if self._plugin_count() == 0:
            pytest.skip(f"this machine has no {self.plugin} device")

    def _plugin_count(self) -> int:
        count: int = self._plugin().count() if isinstance(self.plugin, str) else self.plugin.count()
        return count


class _variables:  # noqa: N801 - reads as a statement
    """Within: of all variables of launchers only these are set."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        for name in LAUNCH_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(self.variables)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


def _processes_with(text: str) -> list[int]:
    """Return the ids of processes with `text` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_text() and (folder / "stat").read_text().rpartition(")")[2][1] != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found
