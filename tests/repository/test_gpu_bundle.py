"""What carries the GPU tests to another machine: wheels unpacked there, options as the page says, a table of outcomes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def run():
    specification = importlib.util.spec_from_file_location("run_of_the_bundle", RUN)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_wheels_are_unpacked_with_their_programs(run, tmp_path):
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing/__init__.py", "x = 1")
        wheel.writestr("thing-1.dist-info/METADATA", "Name: thing")
        wheel.writestr("thing-1.data/scripts/thing", "#!python\nprint(1)")
        wheel.writestr("thing-1.data/purelib/other.py", "y = 2")
        wheel.writestr("thing-1.data/data/share/doc", "left out")
    site = tmp_path / "deep" / "site"
    run.unpack([tmp_path / "thing-1-py3-none-any.whl"], site)

    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert files == {"thing/__init__.py", "thing-1.dist-info/METADATA", "bin/thing", "other.py"}
    assert subprocess.run([site / "bin" / "thing"], capture_output=True, check=True).stdout == b"1\n"


def test_the_page_names_the_options(run):
    page = (ROOT / "docs" / "gpu.md").read_text()
    usage = subprocess.run([sys.executable, RUN, "--help"], capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"`(--[a-z-]+)", page))

    assert {"--seconds", "--gpu-only", "--cpu-only", "--json"} <= options
    for option in options - {"--nproc-per-node"}:
        assert option in usage + (ROOT / "tests" / "gpu" / "bundle.py").read_text(), option


def test_every_selected_file_exists(run):
    for name in (*run.CPU_PART, *run.NOT_IN_A_BUNDLE):
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name


@pytest.mark.when_changed("benchmarks/", "scripts/", reason="it runs a benchmark, which only its folder changes")
@pytest.mark.slow
def test_the_benchmark_of_llama_runs_both_loops(tmp_path):
    command = [
        sys.executable, ROOT / "benchmarks" / "llama.py", "--device", "cpu", "--small", "--rounds", "1", "--rows", "fsdp",
        "--json", tmp_path / "llama.json",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "llama.json").read_text())["rows"]
    assert row["tokens_per_s_gpu"] > 0
    assert row["by_hand_tokens_per_s_gpu"] > 0


@pytest.mark.slow
def test_outcomes_are_written_as_they_come_and_tabled(run, tmp_path):
    (tmp_path / "test_things.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "def test_skips(): pytest.skip('not today')\n"
        "@pytest.fixture\ndef broken(): raise OSError('gone')\n"
        "def test_cannot_start(broken): pass\n"
        "def test_expected(): pytest.xfail('refused')\n"
    )
    record = tmp_path / "outcomes.jsonl"
    (tmp_path / "test_unreadable.py").write_text("import no_such_package\n")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "outcomes", f"--outcomes={record}", "-p", "no:cacheprovider",
        "--continue-on-collection-errors", "--rootdir", tmp_path, "-c", "/dev/null", tmp_path,
    ]  # fmt: skip
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(RUN.parent)}, capture_output=True, check=False)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    tests = {line["test"].rpartition("::")[2]: line for line in lines if "test" in line}

    assert {"planned": 5} in lines
    assert "no_such_package" in tests.pop("test_unreadable.py")["reason"]
    assert {name: line["outcome"] for name, line in tests.items()} == {
        "test_passes": "passed", "test_fails": "failed", "test_skips": "skipped", "test_cannot_start": "failed",
        "test_expected": "xfailed",
    }  # fmt: skip
    assert tests["test_skips"]["reason"] == "not today"
    table = run.table([{"part": "gpu", **line} for line in tests.values()])
    assert "gpu part: 1 skipped: not today" in table
    assert "assert 1 == 2" in table
    assert "gone" in table
