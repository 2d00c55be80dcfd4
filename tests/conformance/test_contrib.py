"""The packages in contrib/ live outside the tree: each is built into a wheel, installed, and passes its own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("contrib/*/pyproject.toml") if path.parent.name != "template")


#: Importing what these log to takes most of a minute.
SLOW = ("mlflow", "wandb")


@pytest.mark.slow
@pytest.mark.parametrize(
    "package",
    [pytest.param(path, marks=[pytest.mark.sweep] if path.name in SLOW else []) for path in PACKAGES],
    ids=lambda path: path.name,
)
def test_its_wheel_passes_its_tests(package, tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, package], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    tests = tmp_path / "tests"
    tests.mkdir()
    for path in package.glob("test_*.py"):
        (tests / path.name).write_text(path.read_text())

    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 10


def test_there_is_a_strategy_and_a_comm_hook():
    text = "\n".join((path / "pyproject.toml").read_text() for path in PACKAGES)

    assert '"stratagem.strategy"' in text
    assert '"stratagem.comm_hook"' in text
