"""One command runs all benchmarks: it finds their tables, draws them, and puts them into the docs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded():
    found = importlib.util.spec_from_file_location("benchmarks_run", ROOT / "benchmarks" / "run.py")
    module = sys.modules["benchmarks_run"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


benchmarks = loaded()

PRINTED = """torch 2.13.0
500 steps, 3 rounds

| | median | max |
|---|---|---|
| raw | 202 | 204 |
| ours & theirs | +12.5 | +1,300 |

a line between
| size | ratio |
|---|---|
| small | 0.99 |
the end
"""


def test_tables_are_found_with_the_line_above_each():
    assert benchmarks.tables_in(PRINTED) == (
        "500 steps, 3 rounds\n\n| | median | max |\n|---|---|---|\n| raw | 202 | 204 |\n| ours & theirs | +12.5 | +1,300 |\n"
        "\n\na line between\n\n| size | ratio |\n|---|---|\n| small | 0.99 |"
    )


def test_the_page_shows_tables_and_bars():
    page = benchmarks.page({"loop": benchmarks.tables_in(PRINTED)}, "today")

    assert page.count("<table>") == page.count("<svg") == 2
    assert "ours &amp; theirs" in page
    assert 'width="400.0"' in page  # the longest bar


@pytest.mark.parametrize(
    ("cell", "value"), [("+1,300", 1300.0), ("0.99 (0.9 to 1.1)", 0.99), ("-3", -3.0), ("", None), ("none", None)]
)
def test_numbers_are_read_from_cells(cell, value):
    assert benchmarks.number(cell) == value


def test_the_tables_of_the_docs_are_replaced_between_their_marks():
    text = "before\n<!-- loop -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    new = benchmarks.update(text, {"loop": "| a |"}, "today")

    assert new == (
        "before\n<!-- loop -->\n\ntoday.\n\n| a |\n\n![What the loop itself costs](pictures/benchmark-loop.svg)\n\n"
        "<!-- end -->\nafter <!-- end -->\n"
    )
    assert benchmarks.update(new, {"loop": "| a |"}, "today") == new
    with pytest.raises(SystemExit, match="no line <!-- ddp -->"):
        benchmarks.update(text, {"ddp": "| a |"}, "today")


def test_every_benchmark_exists_and_has_its_place_in_the_docs():
    page = (ROOT / "docs" / "benchmarks.md").read_text()

    for name in benchmarks.BENCHMARKS:
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), name
        assert f"<!-- {name} -->" in page, name


@pytest.mark.slow
def test_what_scripts_print_is_written_and_one_that_fails_is_shown(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("print('before\\n| | s |\\n|---|---|\\n| raw | 202 |')")
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(sys.argv[1] == '--quick' and 2)")
    monkeypatch.setattr(benchmarks, "HERE", tmp_path)
    monkeypatch.setattr(
        benchmarks,
        "BENCHMARKS",
        {"broken": benchmarks.Benchmark("One that fails"), "good": benchmarks.Benchmark("One that does not")},
    )
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--out", str(tmp_path / "out")])

    with pytest.raises(SystemExit, match="broken failed with code 2"):
        benchmarks.main()

    assert "## One that does not: `benchmarks/good.py`" in (tmp_path / "out" / "results.md").read_text()
    assert "| raw | 202 |" in (tmp_path / "out" / "results.md").read_text()
    assert "<svg" in (tmp_path / "out" / "results.html").read_text()


@pytest.mark.sweep(
    guard="tests/repository/test_benchmarks.py::test_what_scripts_print_is_written_and_one_that_fails_is_shown"
)
@pytest.mark.slow
def test_one_command_runs_a_benchmark_and_writes_its_tables(tmp_path):
    command = [sys.executable, "benchmarks/run.py", "--quick", "--only", "imports", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "import torch" in (tmp_path / "results.md").read_text()
    assert "<svg" in (tmp_path / "results.html").read_text()


@pytest.mark.when_changed(
    "benchmarks/",
    guard="tests/repository/test_benchmarks.py::test_what_scripts_print_is_written_and_one_that_fails_is_shown",
)
@pytest.mark.slow
def test_a_benchmark_that_fails_is_shown(tmp_path, monkeypatch):
    broken = benchmarks.Benchmark("broken", quick=("--no-such-option",))
    with pytest.raises(benchmarks.BenchmarkError, match="imports failed with code 2"):
        benchmarks.run("imports", broken, quick=True)

    monkeypatch.setattr(
        benchmarks, "BENCHMARKS", {"imports": broken, "optimizers": benchmarks.BENCHMARKS["optimizers"]}
    )
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="imports failed with code 2"):
        benchmarks.main()
    assert "AdamW" in (tmp_path / "results.md").read_text(), "the other one was measured"
