"""Any `os.PathLike` is a path, wherever a path is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from stratagem.loggers import CSVLogger, TensorBoardLogger
from stratagem_testing.reference import Net, joined_batches

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 1}


class Like:
    """A path that is neither a text nor a `Path`, and whose text is something else."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.fixture(params=["like", "tmpdir"])
def like(request, tmp_path, tmpdir):
    return (lambda name: Like(tmp_path / name)) if request.param == "like" else tmpdir.join


def test_options_of_trainer_callbacks_loggers_and_run_are_paths(like, tmp_path):
    callbacks = [ModelCheckpoint(dirpath=like("kept")), OnExceptionCheckpoint(dirpath=like("error"))]
    by_name = {"name": "model_checkpoint", "dirpath": like("also"), "monitor": "train_loss"}
    loggers = [
        CSVLogger(save_dir=like("csv")),
        TensorBoardLogger(like("board")),
        {"name": "csv", "save_dir": like("rows")},
    ]
    trainer = sg.Trainer(default_root_dir=like("root"), callbacks=[*callbacks, by_name], logger=loggers, **QUIET)
    trainer.fit(Net(), joined_batches(3, 4))

    assert {type(each.dirpath) for each in callbacks} == {type(Path())}
    assert Path(trainer.default_root_dir) == tmp_path / "root"
    assert {"kept", "also", "csv", "board", "rows"} <= {path.name for path in tmp_path.iterdir()}
    assert sg.Run(accelerator="cpu", default_root_dir=like("run")).settings.default_root_dir == tmp_path / "run"


@pytest.mark.parametrize("form", ["full", "safetensors", "sharded", "dcp"])
def test_checkpoints_are_written_to_and_read_from_paths(like, tmp_path, form):
    quiet = QUIET | {"logger": False, "enable_checkpointing": False, "checkpoint": form}
    module, trainer = Net(), sg.Trainer(**quiet)
    trainer.fit(module, joined_batches(3, 4))
    trainer.save_checkpoint(like("saved"))
    more = sg.Trainer(**quiet | {"max_epochs": 2})
    more.fit(Net(), joined_batches(3, 4), ckpt_path=like("saved"))

    assert (tmp_path / "saved").exists()
    assert more.ckpt_path == tmp_path / "saved"
    assert more.global_step == 2 * trainer.global_step
    if form == "full":
        again = Net.load_from_checkpoint(like("saved"))
        assert all(map(torch.equal, again.parameters(), module.parameters()))
