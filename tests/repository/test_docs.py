"""What the documentation shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.testing import run_in_processes
from stratagem.testing.reference import Net, joined_batches, part, relative_difference, train_plainly

ROOT = Path(__file__).parents[2]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def snippets(name: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_script_runs(tmp_path):
    (script,) = snippets("README.md")
    (tmp_path / "train.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert result.returncode == 0, result.stderr
    assert "effective batch size 64" in result.stdout
    assert len(script.splitlines()) <= 35


def test_the_tutorial_runs(tmp_path):
    source = "\n".join(snippets("docs/tutorial.md"))
    (tmp_path / "tutorial.py").write_text(source)
    result = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "stratagem_logs" / "version_0" / "metrics.csv").exists()


def plugins() -> dict[str, type]:
    """The three plugins of docs/writing-a-plugin.md."""
    found: dict[str, type] = {}
    for source in snippets("docs/writing-a-plugin.md"):
        module = types.ModuleType("snippet")
        sys.modules["snippet"] = module
        exec(source, module.__dict__)
        found |= {n: v for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == "snippet"}
    return found


def test_plugins_of_the_docs_are_short():
    sources = snippets("docs/writing-a-plugin.md")

    assert len(sources) == 3
    assert all(len(source.splitlines()) < 35 for source in sources)


def _train(rank, world_size, batches, kind):
    arguments = {
        "strategy": {"strategy": plugins()["Averaging"]()},
        "comm_hook": {"strategy": "ddp", "comm_hook": plugins()["Truncate"]()},
    }[kind]
    model = Net()
    trainer = sg.Trainer(max_epochs=1, devices=world_size, gradient_clip_val=1.0, **arguments, **QUIET)
    trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "tolerance"), [("strategy", 1e-6), ("comm_hook", 1e-4)])
def test_plugins_of_the_docs_train_as_plain_pytorch(kind, tolerance):
    batches = joined_batches(10, 16)
    first, second = run_in_processes(_train, 2, batches, kind)

    assert relative_difference(first, train_plainly(batches, max_norm=1.0)[0]) < tolerance
    assert relative_difference(first, second) == 0


def test_the_precision_of_the_docs_rounds():
    batches = joined_batches(4, 16)
    rounded = [((x * 2).round() / 2, y) for x, y in batches]
    model = Net()
    sg.Trainer(max_epochs=1, precision=plugins()["RoundedInputs"](), **QUIET).fit(model, batches)

    assert relative_difference(model.state_dict(), train_plainly(rounded)[0]) < 1e-7


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
