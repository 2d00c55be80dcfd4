"""The kit bites: it passes a correct plugin, and notices every bug that is put into one."""

from __future__ import annotations

import inspect
import sys

import pytest
from mutants import MUTANTS, Counting, Replicated

import stratagem_launchers_local
from programs import scripts
from stratagem.discovery import registry
from stratagem_testing import CallbackConformance, LauncherConformance, StrategyConformance

#: Bugs that the kit cannot see, and why.
SURVIVORS: dict[str, str] = {}


@pytest.mark.sweep(guard="tests/conformance/test_strategies.py::TestDDP")
class TestReplicated(StrategyConformance):
    """The plugin that the mutants are made of, correct and given as an instance."""

    plugin = Replicated()


class TestCounting(CallbackConformance):
    plugin = Counting()


@pytest.mark.every_push(
    "DifferentiatesPastTheModule",
    "NoBroadcast",
    "ClipsBeforeAveraging",
    "WrappedNamesInTheCheckpoint",
    "OptimizerNotRestored",
    "LeavesFiles",
    "ConvertsIntegersToo",
    "UndocumentedOption",
    "StateUnderTheObject",
    "PlansHalfOfWhatItSends",
    "PlansWithoutTheCopyThatItKeeps",
)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_kit_notices(mutant):
    caught = mutant.caught_by()

    assert (caught is None) == (mutant.name in SURVIVORS), f"caught by {caught}"


FORGETFUL = """
import stratagem_launchers_local as local

local.flush_files = lambda: None


class Forgetful(local.ForkLauncher):
    pass
"""


@pytest.mark.when_changed(
    "plugins/testing/",
    "plugins/basics/stratagem_launchers_local",
    guard="tests/conformance/test_mutations.py::test_the_kit_notices",
)
@pytest.mark.slow
def test_the_kit_notices_a_launcher_that_loses_lines_of_open_files(install, monkeypatch):
    monkeypatch.setattr(stratagem_launchers_local, "flush_files", stratagem_launchers_local.flush_files)
    install("forgetful", {"stratagem.launcher": {"forgetful": "Forgetful"}}, FORGETFUL)
    monkeypatch.setenv("PYTHONPATH", sys.path[0])  # for the programs that the kit starts
    checks = dict(
        type(
            "Mutated", (LauncherConformance,), {"plugin": "forgetful", "popen": scripts.Popen, "world_sizes": (2,)}
        ).checks()
    )

    with pytest.raises(AssertionError, match="'a line'"):
        checks["test_lines_in_open_files_are_written[2]"]()
    checks["test_every_process_has_its_place[2]"]()


def test_plans_are_compared_here_and_left_out_where_stratagem_plan_is_missing(monkeypatch):
    assert registry.find("command", "plan").distribution == "stratagem-plan"  # a skip would hide that it is missing
    for name, found in (("_scan", ()), ("_named", {})):
        monkeypatch.setattr(registry, name, lambda *_, found=found: found)

    with pytest.raises(pytest.skip.Exception, match="pip install stratagem-plan"):
        TestReplicated().test_a_plan_says_what_a_run_sends_and_holds(1)


def test_every_mutant_changes_a_method_and_names_a_check_that_exist():
    stale = []
    for mutant in MUTANTS:
        cls = type(mutant.plugin)
        bases = [base for base in cls.__mro__[1:] if base is not object]
        private = [name for name, value in vars(cls).items() if name.startswith("_") and inspect.isfunction(value)]
        unknown = [name for name in private if name[1] != "_" and not any(hasattr(base, name) for base in bases)]
        used = {name for value in vars(cls).values() if inspect.isfunction(value) for name in value.__code__.co_names}
        stale += [f"{mutant.name}.{name}" for name in unknown if name not in used]
        if not any(name.startswith(mutant.first) for name, _ in mutant.conformance().checks()):
            stale.append(f"{mutant.name}: {mutant.first}")

    assert not stale


def test_at_least_95_of_a_hundred_are_caught():
    assert len(MUTANTS) >= 40
    assert len(SURVIVORS) / len(MUTANTS) <= 0.05
