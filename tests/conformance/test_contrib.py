"""The packages in contrib/ live outside the tree: each is built into a wheel, installed, and passes its own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent
    for path in ROOT.glob("contrib/*/pyproject.toml")
    if path.parent.name not in ("template", "dp")  # the tests of dp are in tests/
    and not (path.parent / "engine.lock").exists()
)
#: Those that have an environment of their own, and whether it is made in seconds.
ENGINES = {path.parent.name: "# quick" in path.read_text().splitlines() for path in ROOT.glob("contrib/*/engine.lock")}


#: The package that `make test` tests even where nothing changed.
ALWAYS = "bf16_feedback"


def when_changed(name):
    """Mark a package to be tested where it, or what it imports, changed."""
    return [] if name == ALWAYS else [pytest.mark.when_changed(f"contrib/{name}/")]


def cases(package):
    """Return a case of a package, or one for each file of its tests: those of a cluster take minutes."""
    files = sorted(path.stem for path in package.glob("test_*.py"))
    several = [(name, f"{package.name}-{name.removeprefix('test_')}") for name in files]
    for only, name in several if len(files) > 1 else [("", package.name)]:
        yield pytest.param(package, only, marks=when_changed(package.name), id=name)


@pytest.mark.when_changed(
    "contrib/",
    "plugins/testing/",
    guard="tests/repository/test_docs.py::test_the_comm_hook_of_the_docs_is_short_and_passes_the_kit",
)
@pytest.mark.slow
@pytest.mark.parametrize(("package", "only"), [case for path in PACKAGES for case in cases(path)])
def test_its_wheel_passes_its_tests(package, only, tmp_path):
    # What pip does with a package whose backend is flit and whose wheel has only Python: build it, and unpack it.
    build = f"from flit_core import buildapi; buildapi.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=package, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    tests = tmp_path / "tests"
    tests.mkdir()
    for path in (*package.glob("test_*.py"), *package.glob("conftest.py"), ROOT / "examples" / "digits.py"):
        (tests / path.name).write_text(path.read_text())
    page = ROOT / "docs" / f"{package.name}.md"
    if page.exists():  # its tests run what it shows
        (tests / page.name).write_text(page.read_text())

    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only, str(tests)]
    result = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > (0 if only else 10)


def marks_of(name):
    """Making an environment takes seconds where a change of the package, or of what it imports, calls for it.

    Each engine is a group, so that shards share the engines.
    """
    guard = "tests/repository/test_docs.py::test_the_comm_hook_of_the_docs_is_short_and_passes_the_kit"
    quick = pytest.mark.when_changed(f"contrib/{name}/", guard=guard)
    return [quick if ENGINES[name] else pytest.mark.sweep(guard=guard), pytest.mark.xdist_group(f"engine {name}")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in sorted(ENGINES)])
def test_it_passes_its_tests_with_its_engine(name):
    command = [sys.executable, ROOT / "scripts" / "engines.py", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 10


def test_there_is_a_strategy_and_a_comm_hook():
    text = "\n".join((path / "pyproject.toml").read_text() for path in PACKAGES)

    assert '"stratagem.strategy"' in text
    assert '"stratagem.comm_hook"' in text
