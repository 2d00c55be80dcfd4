"""Options of model_checkpoint that Lightning's has: links, intervals in time, counts as monitor, values of the worst."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


class Scored(Net):
    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def validation_step(self, batch, batch_idx):
        self.log("score", self.scores[self.current_epoch])


def fit(folder, scores, ckpt_path=None, trainer=None, **options):
    callback = ModelCheckpoint(**options)
    arguments = {"max_epochs": len(scores), "callbacks": callback, "default_root_dir": folder}
    trained = sg.Trainer(**QUIET | arguments | (trainer or {}))
    batches = joined_batches(2, 8)
    module = Scored(scores)
    trained.fit(module, batches, batches, ckpt_path=ckpt_path)
    return callback, module


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.endswith(".sum"))


@pytest.mark.every_push("sharded")
@pytest.mark.parametrize("checkpoint", ["full", "dcp", "sharded", "safetensors"])
def test_last_as_a_link_points_to_the_newest_that_was_saved(tmp_path, checkpoint):
    form = {"checkpoint": checkpoint}
    callback, module = fit(tmp_path, [2.0, 1.0, 3.0], monitor="score", save_last="link", trainer=form)

    last, best = (tmp_path / "checkpoints" / os.path.basename(path)
                  for path in (callback.last_model_path, callback.best_model_path))  # fmt: skip
    assert last.is_symlink()
    assert last.resolve() == best.resolve()
    assert len(names(tmp_path)) == 2
    resumed, again = fit(
        tmp_path, [2.0, 1.0, 3.0, 0.5], ckpt_path="last", monitor="score", save_last="link", trainer=form
    )
    assert (tmp_path / "checkpoints" / os.path.basename(resumed.last_model_path)).resolve().name.startswith("epoch=3")
    whole = fit(tmp_path / "whole", [2.0, 1.0, 3.0, 0.5], monitor="score", trainer=form)[1]
    assert relative_difference(again.state_dict(), whole.state_dict()) == 0
    assert len(names(tmp_path)) == 2


def test_a_link_replaces_the_file_that_an_earlier_run_with_other_options_saved(tmp_path):
    fit(tmp_path, [1.0], save_last=True)
    fit(tmp_path, [1.0, 2.0], ckpt_path="last", save_last="link")

    assert names(tmp_path) == ["epoch=1-step=4.ckpt", "last.ckpt"]
    assert (tmp_path / "checkpoints" / "last.ckpt").is_symlink()
    assert (tmp_path / "checkpoints" / "last.ckpt.sum").is_symlink()


def test_a_file_replaces_the_link_that_an_earlier_run_made(tmp_path):
    fit(tmp_path, [1.0], save_last="link", save_top_k=-1)
    fit(tmp_path, [1.0, 2.0], ckpt_path="last", save_last=True, save_top_k=-1)

    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "checkpoints" / "epoch=0-step=2.ckpt")["loop"]["global_step"] == 2
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt")["loop"]["global_step"] == 4


def test_an_interval_in_time_saves_within_epochs(tmp_path):
    fit(tmp_path, [1.0, 2.0], train_time_interval=timedelta(0), save_top_k=-1)
    assert names(tmp_path) == [f"epoch={step // 3}-step={step}.ckpt" for step in (1, 2, 3, 4)]

    fit(tmp_path / "long", [1.0, 2.0], train_time_interval=3600, save_top_k=-1)
    assert not (tmp_path / "long" / "checkpoints").exists() or not names(tmp_path / "long")


class Impatient(sg.Callback):
    """Makes the clock of rank 1 run ahead in the first batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 0:
            trainer.checkpoint_callback._next_save = 0


def interval_on_two_ranks(rank, world_size, folder):
    saving = ModelCheckpoint(train_time_interval=3600, save_top_k=-1)
    arguments = {"devices": world_size, "strategy": "ddp", "callbacks": [Impatient(), saving], "max_epochs": 1}
    sg.Trainer(**QUIET, **arguments, default_root_dir=folder).fit(Net(), joined_batches(2, 8))


def test_all_ranks_save_when_one_finds_that_it_is_time(tmp_path):
    run_in_processes(interval_on_two_ranks, 2, tmp_path)

    assert names(tmp_path) == ["epoch=0-step=1.ckpt"]


def test_the_step_as_a_monitor_keeps_the_newest(tmp_path):
    callback, _ = fit(tmp_path, [1.0, 2.0, 3.0], monitor="step", mode="max", save_top_k=2)

    assert names(tmp_path) == ["epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt"]
    assert callback.best_model_score == 6
    assert callback.current_score == 6


def test_the_worst_that_is_kept_and_the_latest_value(tmp_path):
    callback, _ = fit(tmp_path, [2.0, 1.0, 3.0], monitor="score", save_top_k=2)

    assert os.path.basename(callback.kth_best_model_path) == "epoch=0-step=2.ckpt"
    assert (callback.kth_value, callback.current_score) == (2.0, 3.0)
    fresh = ModelCheckpoint()
    assert (fresh.kth_best_model_path, fresh.kth_value, fresh.current_score) == ("", None, None)


def test_saving_is_told_on_request(tmp_path, capsys):
    fit(tmp_path, [2.0, 1.0, 3.0], monitor="score", verbose=True)

    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch"))
    assert first == f"epoch 0, step 2, score 2: saving {tmp_path}/checkpoints/epoch=0-step=2.ckpt"
    assert second.startswith("epoch 1, step 4, score 1: saving ")


def test_what_lightning_passes_by_position_and_as_none():
    callback = ModelCheckpoint("here", None, "score", True, None, 2)

    assert (callback.filename, callback.monitor, callback.verbose) == ("{epoch}-{step}", "score", True)
    assert (callback.save_last, callback.save_top_k) == (False, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_epochs": 1, "train_time_interval": 3}, "has every_n_epochs=1 and train_time_interval=.*3; expected one of them"),
        ({"train_time_interval": "soon"}, "train_time_interval is 'soon'; expected"),
        ({"save_last": "link", "save_top_k": 0}, "with save_top_k=0; expected a checkpoint to link to"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ModelCheckpoint(**options)


def test_a_link_at_a_url_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='save_last is "link", and the folder is .s3://bucket'):
        fit(tmp_path, [1.0], dirpath="s3://bucket/run", save_last="link")


class Failing(Scored):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            raise RuntimeError("no more")
        return super().training_step(batch, batch_idx)


def test_an_exception_is_saved_on_request(tmp_path):
    callback = ModelCheckpoint(save_on_exception=True)
    trainer = sg.Trainer(**QUIET, max_epochs=3, callbacks=callback, default_root_dir=tmp_path)
    batches = joined_batches(2, 8)
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(Failing([1.0, 2.0, 3.0]), batches, batches)

    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "on_exception.ckpt"]
    assert callback.saved_on_exception
    whole = fit(tmp_path / "whole", [1.0, 2.0, 3.0])[1]
    resumed = fit(tmp_path, [1.0, 2.0, 3.0], ckpt_path=tmp_path / "checkpoints" / "on_exception.ckpt")[1]
    assert relative_difference(resumed.state_dict(), whole.state_dict()) == 0


def test_the_folder_that_was_used_can_be_read_after_a_fit(tmp_path):
    callback = ModelCheckpoint()
    assert callback.dirpath is None
    default = ModelCheckpoint(dirpath=tmp_path / "given")
    assert default.dirpath == tmp_path / "given"

    for folder in (tmp_path / "one", tmp_path / "two"):
        trainer = sg.Trainer(**QUIET, max_epochs=1, callbacks=callback, default_root_dir=folder)
        trainer.fit(Scored([1.0]), joined_batches(2, 8))
        assert trainer.checkpoint_callback.dirpath == folder / "checkpoints"
        saved = torch.load(callback.best_model_path, weights_only=True)["callbacks"]
        assert [key for key in saved if "ModelCheckpoint" in key] == [
            "callback.stratagem_callbacks.model_checkpoint:ModelCheckpoint"
        ]

    callback.dirpath = tmp_path / "set"
    sg.Trainer(**QUIET, max_epochs=1, callbacks=callback).fit(Scored([1.0]), joined_batches(2, 8))
    assert callback.dirpath == tmp_path / "set"
    assert callback.best_model_path.startswith(str(tmp_path / "set"))


def test_the_folder_that_launched_processes_used_can_be_read(tmp_path):
    trainer = sg.Trainer(**QUIET, max_epochs=1, devices=2, launcher="fork", default_root_dir=tmp_path)
    trainer.fit(Scored([1.0]), joined_batches(2, 8))

    assert trainer.checkpoint_callback.dirpath == tmp_path / "checkpoints"
