"""Run checks of one class in one group of processes for each world size, rather than in one for each check.

[Note: shared processes]
Most of what a check costs is the start of its processes. Before the first check of a class that starts any, each of its
checks is called until it calls `Conformance.run_in`, which only records the function and its arguments. All recorded
functions then run one after the other in the same processes, and each check gets the results of its own. Between two
of them, everything is done that ends a process: runs are closed, the process group is destroyed, and the environment,
the working folder and the random numbers are restored.

A check has processes of its own if it is called by `Conformance.checks`, if its function failed or did not end, if an
argument is a path, if the plugin is an instance, whose state all checks would share, or if one rank may refuse what
the others do: these learn it when its process ends. See `run_alone`, `run_first` and `run_last`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen

from stratagem_testing.processes import ProcessesFailed, run_in_processes

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: The time limit of shared processes, in time limits of one check. Together they take a few seconds.
_LIMITS = 2


def run_alone(function: _Function) -> _Function:
    """Mark a function that one rank may refuse: it has processes of its own."""
    function.alone = True  # type: ignore[attr-defined]
    return function


def run_first(function: _Function) -> _Function:
    """Mark a function that measures its process: it runs before others."""
    function.turn = -1  # type: ignore[attr-defined]
    return function


def run_last(function: _Function) -> _Function:
    """Mark a function in which a rank fails: it runs after others."""
    function.turn = 1  # type: ignore[attr-defined]
    return function


@frozen
class Call:
    """What a check calls in its processes."""

    function: Callable[..., Any]
    world_size: int
    arguments: tuple[Any, ...]

    @property
    def may_share(self) -> bool:
        """Whether others may run in the same processes; a path belongs to a folder that the check removes."""
        given = (self.function, *self.arguments)
        return not any(isinstance(each, Path) or (callable(each) and hasattr(each, "alone")) for each in given)

    @property
    def turn(self) -> int:
        """When it runs among others: -1 for first, 1 for last."""
        return sum(getattr(each, "turn", 0) for each in (self.function, *self.arguments) if callable(each))


class Recorded(BaseException):
    """Ends a check that is called to learn what it runs in processes."""


@define(eq=False)
class Recorder:
    """Stands in for the processes of one check: records its first call, and ends the check."""

    call: Call | None = None

    def results_of(self, call: Call) -> None:
        self.call = call
        raise Recorded


@define(eq=False)
class Share:
    """The results of one check's first call, which ran in shared processes."""

    run: SharedRun
    name: str

    def results_of(self, call: Call) -> list[Any] | None:
        """Return the results of `call`, once; None if it did not run in shared processes."""
        return self.run.take(self.name, call)


@define(eq=False)
class SharedRun:
    """The first calls of `checks`, by name; they run when the first result is asked for."""

    checks: dict[str, Callable[[Recorder], None]]
    limit_s: float
    _results: dict[str, tuple[Callable[..., Any], list[Any]]] | None = field(default=None, init=False)

    def take(self, name: str, call: Call) -> list[Any] | None:
        """Return the results of `call`, the first of the check `name`, and forget them."""
        if self._results is None:
            self._results = self._run()
        function, results = self._results.pop(name, (None, None))
        return results if function is call.function else None

    def _run(self) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
        by_size = defaultdict[int, dict[str, Call]](dict)
        for name, check in self.checks.items():
            call = _first_call(check)
            if call is not None and call.may_share:
                by_size[call.world_size][name] = call
        done: dict[str, tuple[Callable[..., Any], list[Any]]] = {}
        for size, calls in by_size.items():
            names = sorted(calls, key=lambda name: calls[name].turn)
            results = _run_each([calls[name] for name in names], size, self.limit_s) if len(calls) > 1 else {}
            done |= {names[number]: (calls[names[number]].function, each) for number, each in results.items()}
        return done


def _first_call(check: Callable[[Recorder], None]) -> Call | None:
    """Return the first call of `check`; None if it makes none. What it raises is raised again when it runs."""
    recorder = Recorder()
    with contextlib.suppress(Recorded, Exception), _restored():
        _no_outcome(check, recorder)
    return recorder.call


def _no_outcome(check: Callable[[Recorder], None], recorder: Recorder) -> None:
    """Call `check`; neither skips nor failures are its outcome, which pytest raises as no `Exception`."""
    import pytest

    with contextlib.suppress(pytest.skip.Exception, pytest.fail.Exception):
        check(recorder)


def _run_each(calls: Sequence[Call], world_size: int, limit_s: float) -> dict[int, list[Any]]:
    """Run `calls` in the same processes; return the results by number, without those of calls that failed."""
    done: dict[int, list[Any]] = {}
    first = 0
    while first < len(calls):
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as name:
            rest = calls[first:]
            with contextlib.suppress(ProcessesFailed):
                run_in_processes(_write_in_turn, world_size, rest, Path(name), limit_s=_LIMITS * limit_s)
            found = list(_read(Path(name), world_size, len(rest)))
        done |= dict(enumerate(found, first))
        first += len(found) + 1  # the next one failed: its check runs it again, in processes of its own
    return done


def _read(folder: Path, world_size: int, count: int) -> Iterator[list[Any]]:
    """Yield the results of the first calls that ended on all ranks."""
    for number in range(count):
        paths = [folder / f"{number}.{rank}" for rank in range(world_size)]
        if not all(path.exists() for path in paths):
            return
        yield [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301 - our own bytes


# --- In each process ---------------------------------------------------------------------------------------------


def in_turn(rank: int, size: int, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call `function` with each of `arguments`, each time as if it were the first in this process."""
    return list(_in_turn(rank, size, [Call(function, size, each) for each in arguments]))


def _write_in_turn(rank: int, size: int, calls: Sequence[Call], folder: Path) -> None:
    for number, result in enumerate(_in_turn(rank, size, calls)):
        partial = folder / f"partial.{rank}"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(folder / f"{number}.{rank}")


def _in_turn(rank: int, size: int, calls: Sequence[Call]) -> Iterator[Any]:
    atexit._clear()  # the parent's functions are not for this process
    for call in calls:
        with _restored():
            result = call.function(rank, size, *call.arguments)
            atexit._run_exitfuncs()  # closes runs, and destroys the process group
        yield result


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore what a process begins with: variables, working folder, random numbers and torch's default dtype."""
    variables, here = dict(os.environ), Path.cwd()
    numbers, torch_numbers, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(here)
        random.setstate(numbers)
        torch.set_rng_state(torch_numbers)
        torch.set_default_dtype(dtype)
