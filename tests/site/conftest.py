"""The site, built once for all tests of this folder: they run on one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


#: Of what is built, nothing else changes a line.
WHERE_IT_CHANGED = pytest.mark.when_changed(
    "docs/", "scripts/site/", "mkdocs.yml", reason="`make docs` builds the site, too"
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keep these tests together; those that build the site run where its sources changed."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("site"))
            if {"built", "build_site"} & {*item.fixturenames}:
                item.add_marker(WHERE_IT_CHANGED)


def build(folder: Path, configuration: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site strictly, as `make docs` does, into `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", configuration, "-d", folder], cwd=ROOT, text=True,
        capture_output=True, check=False, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def build_site():
    """Return the function that builds the site."""
    return build


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """Return the folder of the site."""
    folder = tmp_path_factory.mktemp("site") / "built"
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
