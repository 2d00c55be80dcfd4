"""Projects written for Lightning train after `stratagem migrate --write`, without another change.

The folders of `migrate_projects` ran under Lightning 1.6 (cifar_baseline, linear_regression) and 2.6 (the others) with the
same losses.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import scripts
from stratagem.cli import main

PROJECTS = Path(__file__).parent / "migrate_projects"


@pytest.fixture
def migrated(tmp_path, capsys):
    """Return a function that copies a project into a repository, and rewrites it there."""

    def migrate(name):
        folder = tmp_path / name
        shutil.copytree(PROJECTS / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
            subprocess.run([*git, *command], check=True)
        assert main(["migrate", "--write", str(folder)]) == 0
        said = capsys.readouterr().out
        assert "nothing left to change" in said, said
        texts = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
        assert main(["migrate", "--write", str(folder)]) == 0
        assert texts == {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
        rewritten = [text for path, text in texts.items() if ".git" not in path.parts and path.suffix != ".ipynb"]
        assert not any(b"lightning" in text for text in rewritten)
        return folder

    return migrate


def run(folder, *arguments):
    done = scripts.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.when_changed(
    "plugins/migrate/",
    guard="tests/plugins/test_migrate_projects.py::test_a_baseline_whose_parent_class_saves_hyper_parameters_trains",
)
@pytest.mark.slow
def test_a_project_of_hydra_trains(migrated):
    """Class names in the configuration, callbacks and loggers as dictionaries, partial optimizers."""
    folder = migrated("hydra_template")

    run(folder, "-m", "src.train")

    trained, tested = map(float, (folder / "accuracy.txt").read_text().split())
    assert trained > 0.9
    assert tested > 0.8
    assert list((folder / "logs" / "train" / "checkpoints").glob("*"))
    assert list((folder / "logs" / "train" / "csv").rglob("metrics.csv"))


@pytest.mark.slow
def test_a_baseline_whose_parent_class_saves_hyper_parameters_trains(migrated):
    folder = migrated("cifar_baseline")

    run(folder, "train.py")

    assert float((folder / "accuracy.txt").read_text()) > 0.9
    assert (folder / "model.ckpt").exists()


@pytest.mark.slow
def test_a_regression_with_a_class_among_its_arguments_trains(migrated):
    folder = migrated("linear_regression")

    run(folder, "linear.py")

    val_loss, epoch_loss = map(float, (folder / "loss.txt").read_text().split())
    assert val_loss < 1e-4
    assert epoch_loss < 1e-4


#: What Lightning 2.6.6 with torch 2.13 printed on a CPU.
LOSSES = {
    "gan_notebook": [
        1.309653401374817, 1.290284276008606, 1.2815864086151123, 1.2761272192001343, 1.2628822326660156, 1.24932861328125,
        0.6249583959579468,
    ],
    "several_loaders": [
        0.5067709684371948, 0.5018290281295776, 0.5877835154533386, 0.4864242672920227, 0.4951499104499817,
        0.6111241579055786, 0.5272055268287659, 0.5356547832489014, 0.6810408234596252, 0.5300242900848389,
        0.5378462076187134, 0.683232307434082,
    ],
}  # fmt: skip


@pytest.mark.when_changed(
    "plugins/migrate/",
    guard="tests/plugins/test_migrate_projects.py::test_fine_tuning_with_several_loaders_has_the_losses_of_lightning",
)
@pytest.mark.slow
def test_a_notebook_with_manual_optimization_has_the_losses_of_lightning(migrated, monkeypatch):
    """Magics, a callback that reads outputs, a progress bar with a refresh rate, private attributes of a logger."""
    folder = migrated("gan_notebook")
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))
    magics = [
        line
        for line in (PROJECTS / "gan_notebook" / "gan.ipynb").read_text().splitlines()
        if '"%' in line or "!" in line
    ]

    run(folder, "-m", "IPython", "gan.ipynb")

    assert json.loads((folder / "losses.json").read_text()) == pytest.approx(LOSSES["gan_notebook"], abs=1e-6)
    lines = (folder / "gan.ipynb").read_text().splitlines()
    assert len(magics) == 4
    assert all(line in lines for line in magics)
    assert "import stratagem as sg" in (folder / "gan.ipynb").read_text()


@pytest.mark.slow
def test_fine_tuning_with_several_loaders_has_the_losses_of_lightning(migrated):
    """Gradients are accumulated over two batches; the last step of an epoch has one."""
    folder = migrated("several_loaders")

    run(folder, "train.py")

    assert json.loads((folder / "losses.json").read_text()) == pytest.approx(LOSSES["several_loaders"], abs=1e-6)
