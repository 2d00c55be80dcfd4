"""The packages in examples/plugins are what others copy: they pass the kit, import the API alone, and are in the docs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from programs import scripts

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))
SOURCES = [path for package in PACKAGES for path in package.glob("stratagem_*.py")]
#: The pages that show the sources of the folders.
PAGES = {
    "writing-a-plugin.md": {"plain_averaging", "step_time", "evaluators"},
    "comm-hook-in-25-lines.md": {"scaled_fp16"},
    "local-updates.md": {"elastic_averaging"},
}


@pytest.mark.when_changed(
    "examples/plugins/",
    "plugins/testing/",
    guard="tests/repository/test_docs.py::test_the_comm_hook_of_the_docs_is_short_and_passes_the_kit",
)
@pytest.mark.slow
def test_they_pass_the_kit(tmp_path):
    """As installed: importable, and their entry points on the path."""
    build = "import sys; from flit_core import buildapi; buildapi.prepare_metadata_for_build_wheel(sys.argv[1])"
    for package in PACKAGES:
        subprocess.run([sys.executable, "-c", build, tmp_path], cwd=package, check=True)
        for path in package.glob("*.py"):
            (tmp_path / path.name).write_text(path.read_text())

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = scripts.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 90


def test_they_import_the_api_alone():
    """And torch, attrs and the standard library."""
    known = {"torch", "attrs", *sys.stdlib_module_names}
    others = {path.name: {name for name in imported_by(path) if name.split(".")[0] not in known} for path in SOURCES}

    assert {path.parent.name for path in SOURCES} == {package.name for package in PACKAGES}
    for names in others.values():
        assert {".".join(name.split(".")[:2]) for name in names} <= {
            "stratagem.api", "stratagem_trainer.api", "stratagem_buckets", "stratagem_outer",
        }  # fmt: skip


def imported_by(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("page", PAGES)
def test_the_docs_show_them_as_they_are(page):
    text = (ROOT / "docs" / page).read_text()
    shown = {path.parent.name for path in SOURCES if f"```python\n{path.read_text()}```" in text}

    assert shown == PAGES[page]
