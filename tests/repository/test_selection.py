"""`make test` runs a case of every promise, a shard of `make test-all` its part, and both run real failures to the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

import selection

ROOT = Path(__file__).parents[2]
WHERE_IT_CHANGED = pytest.mark.when_changed(
    "tests/selection.py", "tests/starts.py", "tests/costs.py", "tests/conftest.py", "scripts/test_all.py",
    reason="it tests how tests are chosen",
)  # fmt: skip

GRID = """
import pytest

@pytest.mark.every_push("a", "c")
@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_grid(case):
    pass

@pytest.mark.sweep(guard="tests/test_grid.py::test_grid")
def test_large():
    pass

@pytest.mark.when_changed("engine/", guard="tests/test_grid.py::test_grid")
def test_engine():
    pass

@pytest.mark.when_changed("engine/", cases=("two",))
@pytest.mark.parametrize("case", ["one", "two"])
def test_part(case):
    pass

class TestMain:
    world_sizes = (1, 2)

    def test_check(self):
        pass

    @pytest.mark.parametrize("world_size", world_sizes)
    def test_in_worlds(self, world_size):
        pass

@pytest.mark.every_push("test_other", guard="tests/test_grid.py::TestMain")
class TestVariant:
    def test_check(self):
        pass

    def test_other(self):
        pass
"""
SOURCE = """
class Early:
    pass
"""
CALLER = """
from early_package.helper import helped

class Late:
    pass
"""


@pytest.fixture
def project(tmp_path):
    """Return a repository with tests that use the markers; it has a branch origin/main."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "selection.py", "costs.py", "starts.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "test_grid.py").write_text(GRID)
    (tmp_path / "tests" / "test_uses.py").write_text(
        "def test_early():\n    'Early'\n\n\ndef test_late():\n    'Late'\n"
    )
    source = tmp_path / "plugins" / "early" / "early_package" / "early.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    source.with_name("helper.py").write_text("def helped():\n    pass\n")
    source.with_name("caller.py").write_text(CALLER)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "source.py").write_text("from early_package import early\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    return tmp_path


def git(project, *words):
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=project, check=True)


def commit(project):
    git(project, "add", ".")
    git(project, "commit", "-qm", "x")


def pytest_in(project, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)


def collected(project, *arguments):
    ended = pytest_in(project, "--collect-only", "-m", "not sweep", *arguments)
    return re.findall(r"^tests/.*::(\S+)$", ended.stdout, re.MULTILINE)


@pytest.mark.slow
def test_make_test_runs_the_chosen_cases_and_packages_that_changed(project):
    chosen = [
        "test_grid[a]",
        "test_grid[c]",
        "test_part[one]",
        "test_check",
        "test_in_worlds[2]",
        "test_other",
        "test_early",
        "test_late",
    ]
    assert collected(project) == chosen

    with_engine = [*chosen[:2], "test_engine", "test_part[one]", "test_part[two]", *chosen[3:]]
    (project / "engine" / "new.py").touch()
    assert collected(project) == with_engine

    (project / "engine" / "new.py").unlink()
    of_package = project / "plugins" / "early" / "early_package"
    (of_package / "caller.py").write_text(CALLER + "# changed\n")
    assert collected(project) == chosen

    (of_package / "early.py").write_text(SOURCE + "# changed\n")
    assert collected(project) == with_engine, "the engine imports it"

    shutil.rmtree(project / ".git")
    assert collected(project) == with_engine, "nobody knows what changed"


def test_every_promise_has_a_test_in_make_test(pytestconfig):
    found = pytestconfig.stash[selection.UNGUARDED]
    if found is None:
        pytest.skip("only a part of the tests was collected")

    assert not found, "\n".join(found)


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_shards_are_disjoint_and_hold_all_cases(project):
    shards = [collected(project, "--shard", f"{number}/3") for number in (1, 2, 3)]

    assert sorted(chain(*shards)) == sorted(collected(project))


def test_the_cases_of_a_test_are_in_one_shard_if_they_share_what_their_group_prepares():
    group = pytest.mark.xdist_group("server").mark
    cases = [SimpleNamespace(nodeid=f"a.py::test[{n}]", get_closest_marker=lambda _: group) for n in range(9)]

    assert [len(selection.shard_of(cases, number, 4)) for number in (1, 2, 3, 4)] == [9, 0, 0, 0]


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_a_promise_without_a_guard_is_named(project):
    good = pytest_in(project, "--collect-only", "--promises=promises.md")
    assert good.returncode == 0, good.stdout
    table = (project / "promises.md").read_text()
    assert "| `tests/test_grid.py::test_grid` | `test_grid[a]` | 2 | 3 |" in table
    assert "| `tests/test_grid.py::test_large` | `tests/test_grid.py::test_grid` | 0 | 1 |" in table
    assert (
        "| `tests/test_grid.py::TestVariant::test_check` | `tests/test_grid.py::TestMain::test_check` | 0 | 1 |"
        in table
    )

    path = project / "tests" / "test_grid.py"
    path.write_text(
        GRID.replace('sweep(guard="tests/test_grid.py::test_grid")', "sweep").replace('TestMain")', 'Gone")')
    )
    bad = pytest_in(project, "--collect-only", "--promises=promises.md")
    assert bad.returncode == 4
    assert "tests/test_grid.py::test_large runs in `make test-all` alone" in bad.stderr
    assert "test_check has the guard tests/test_grid.py::Gone::test_check, which `make test` does not run" in bad.stderr


MISTAKES = {
    'every_push("a", "c")': ('every_push("a", "d")', "every_push of test_grid.py::test_grid names 'd', which is not a case"),
    'every_push("test_other", guard': (
        'every_push("test_another", guard', "every_push of test_grid.py::TestVariant names 'test_another'",
    ),
    'cases=("two",)': ('cases=("three",)', "when_changed of test_part names 'three'"),
    'when_changed("engine/", guard': ('when_changed("engines/", guard', "names 'engines/', which does not exist"),
    'sweep(guard="tests/test_grid.py::test_grid")': ("sweep(gaurd='x')", "sweep of tests/test_grid.py::test_large has 'gaurd'"),
}  # fmt: skip


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_mistakes_in_markers_are_named(project):
    grid = GRID
    for written, (mistake, _) in MISTAKES.items():
        assert written in GRID
        grid = grid.replace(written, mistake)
    (project / "tests" / "test_grid.py").write_text(grid)
    bad = pytest_in(project, "--collect-only", "--promises=promises.md", "tests")

    assert bad.returncode == 4
    for _, message in MISTAKES.values():
        assert message in bad.stderr


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1/0", "2", "a/b", "", "1/2/3"])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(pytest.UsageError, match="--shard is .*; expected one such as 1/4"):
        selection.part_of(shard)


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_a_change_selects_the_tests_that_mention_what_changed(project):
    assert collected(project, "--changed") == []

    package = project / "plugins" / "early" / "early_package"
    (package / "early.py").write_text(SOURCE + "# changed\n")
    assert collected(project, "--changed") == ["test_early"]

    (package / "early.py").write_text("class Early(:")
    assert collected(project, "--changed") == []

    (package / "early.py").write_text(SOURCE)
    (package / "helper.py").unlink()
    assert collected(project, "--changed") == ["test_late"], "it mentions what imports the helper"

    (project / "notes.txt").touch()
    assert "no test was found for notes.txt" in pytest_in(project, "--collect-only", "--changed").stdout
    unknown = pytest_in(project, "--collect-only", "--changed", "--base", "nowhere")
    assert (unknown.returncode, "git knows no commit 'nowhere'" in unknown.stderr) == (4, True)


@WHERE_IT_CHANGED
@pytest.mark.slow
@pytest.mark.parametrize(("source", "wanted"), [
    ("core/engine/step.py", ["test_trains"]), ("plugins/trainer/loop/step.py", ["test_trains"]), ("plugins/x/y/z.py", []),
])  # fmt: skip
def test_a_change_of_the_core_selects_what_trains(project, source, wanted):
    trains, changed = project / "tests" / "parity" / "test_trains.py", project / source
    for path, text in ((trains, "def test_trains():\n    pass\n"), (changed, "")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    commit(project)
    changed.write_text("# changed\n")

    assert collected(project, "--changed", "--base", "HEAD") == wanted


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_costs_count_processes_and_their_cpu_seconds(project):
    (project / "tests" / "test_uses.py").write_text(
        "import subprocess, sys\n\n\ndef test_busy():\n"
        "    code = 'import time\\nwhile time.process_time() < 0.5: pass'\n"
        "    subprocess.run([sys.executable, '-c', code])\n"
    )
    pytest_in(project, "tests/test_uses.py", "--costs", "costs.jsonl")

    (row,) = map(json.loads, (project / "costs.jsonl").read_text().splitlines())
    assert (row["class"], row["interpreters"], row["ranks"]) == ("new programs", 1, 0)
    assert row["cpu"] > 0.4  # a clock that counts hundredths


FORKS = """
import os, subprocess, sys, pytest

def fork():
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)

@pytest.fixture(scope="module")
def shared():
    fork()
    fork()

@pytest.mark.parametrize("case", range(2))
def test_fork(case, shared):
    fork()
    subprocess.run([sys.executable, "-c", ""])

@pytest.mark.when_changed("engine/", guard="tests/test_forks.py::test_fork")
def test_of_the_engine():
    fork()
"""


@WHERE_IT_CHANGED
@pytest.mark.slow
@pytest.mark.parametrize("ceiling", [4, 3])
def test_a_test_that_starts_more_than_the_ceiling_fails_the_run(project, ceiling):
    (project / "engine" / "new.py").touch()
    (project / "tests" / "test_forks.py").write_text(FORKS)
    ceilings = {"test_forks.py": {"ranks": ceiling, "programs": 2}}
    (project / "tests" / "ceilings.json").write_text(json.dumps(ceilings))

    ended = pytest_in(project, "-m", "not gpu and not sweep", "-n", "2", "tests")
    assert "started 2 interpreters, 0 scripts in forks of one and 4 ranks; " in ended.stdout
    assert ("tests/test_forks.py starts 4 ranks; the ceiling in ceilings.json is 3" in ended.stdout) == (ceiling < 4)
    assert ended.returncode == (ceiling < 4), ended.stdout


FLAKY = """
from pathlib import Path

def test_passes_the_second_time():
    marker = Path(__file__).with_name("ran")
    ran = marker.exists()
    marker.touch()
    assert ran
"""


def run_all(project):
    command = [sys.executable, ROOT / "scripts" / "test_all.py", "-n", "1"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300, env=os.environ)


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_a_file_that_cannot_be_read_fails_the_run(project):
    (project / "tests" / "test_flaky.py").write_text(FLAKY)
    (project / "tests" / "test_broken.py").write_text("import nothing_here\n")
    ended = run_all(project)

    assert "passed when run alone: tests/test_flaky" in ended.stdout
    assert "failed twice: tests/test_broken.py" in ended.stdout
    assert ended.returncode == 1


@WHERE_IT_CHANGED
@pytest.mark.slow
@pytest.mark.every_push("3")
@pytest.mark.parametrize("count", [2, 3])
def test_more_than_two_tests_that_pass_only_when_run_again_fail_the_run(project, count):
    for number in range(count):
        (project / "tests" / f"test_flaky{number}.py").write_text(FLAKY.replace('"ran"', f'"ran{number}"'))
    ended = run_all(project)

    assert ended.stdout.count("passed when run alone: tests/test_flaky") == count
    assert ended.returncode == (count > 2), ended.stdout
