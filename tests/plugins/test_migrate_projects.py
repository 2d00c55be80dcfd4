"""Projects written for Lightning train after `stratagem migrate --write`, without another change.

The folders of `migrate_projects` ran under Lightning 2.6 (hydra_template) and 1.6 (the other two) with the same losses.
"""

from __future__ import annotations

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
        assert not any(b"lightning" in text for path, text in texts.items() if ".git" not in path.parts)
        return folder

    return migrate


def run(folder, *arguments):
    done = scripts.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
