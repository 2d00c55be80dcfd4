"""metrics.csv holds every step that logged something, whatever columns come and go."""

from __future__ import annotations

import csv
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import stratagem as sg
from stratagem.errors import ConfigError, StratagemError
from stratagem.loggers import CSVLogger
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_writes_steps_and_epochs(tmp_path):
    trainer = sg.Trainer(max_epochs=2, log_every_n_steps=2, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Net(), joined_batches(4, 8), joined_batches(1, 8))

    written = rows(tmp_path / "stratagem_logs" / "version_0" / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in written] == [
        ("0", "1"), ("0", "2"), ("0", "4"), ("1", "6"), ("1", "8"),
    ]  # fmt: skip
    assert [bool(row["train_loss"]) for row in written] == [True] * 5
    assert [bool(row["val_loss"]) for row in written] == [False, False, True, False, True]


def test_the_last_step_and_its_epoch_have_one_row(tmp_path):
    trainer = sg.Trainer(max_epochs=1, log_every_n_steps=50, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Net(), joined_batches(3, 8), joined_batches(1, 8))

    first, last = rows(tmp_path / "stratagem_logs" / "version_0" / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in (first, last)] == [("0", "1"), ("0", "3")]
    assert first["train_loss"]
    assert last["train_loss"]
    assert last["val_loss"]


def test_another_run_gets_another_folder(tmp_path):
    for _ in range(2):
        sg.Trainer(max_epochs=1, log_every_n_steps=1, default_root_dir=tmp_path, **QUIET).fit(
            Net(), joined_batches(1, 8)
        )

    assert sorted(path.name for path in (tmp_path / "stratagem_logs").iterdir()) == ["version_0", "version_1"]


def test_runs_that_begin_at_once_get_a_folder_each(tmp_path):
    together = threading.Barrier(8)

    def log(logger, root):
        together.wait()
        logger.log_metrics({"a": 1.0}, 0, run_at(root))

    for number in range(10):
        loggers = [CSVLogger() for _ in range(8)]
        threads = [threading.Thread(target=log, args=(logger, tmp_path / str(number))) for logger in loggers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len({logger.log_dir for logger in loggers}) == 8


def run_at(folder):
    return SimpleNamespace(settings=SimpleNamespace(default_root_dir=folder))


def test_new_columns_keep_old_rows(tmp_path):
    logger = CSVLogger(flush_every_n_steps=1)
    for step in range(4):
        logger.log_metrics({"a": step} | ({"b": -step} if step > 1 else {}), step, run_at(tmp_path))
    logger.flush()

    written = rows(logger.log_dir / "metrics.csv")
    assert [row["a"] for row in written] == ["0", "1", "2", "3"]
    assert [row["b"] for row in written] == ["", "", "-2", "-3"]


def test_metrics_of_one_step_share_a_row(tmp_path):
    logger = CSVLogger()
    logger.log_metrics({"a": 1}, 5, run_at(tmp_path))
    logger.log_metrics({"b": 2}, 5, run_at(tmp_path))
    logger.flush()

    assert rows(logger.log_dir / "metrics.csv") == [{"step": "5", "a": "1", "b": "2", "epoch": ""}]


def test_nothing_is_created_before_the_first_metric(tmp_path):
    logger = CSVLogger()
    logger.flush()

    assert logger.log_dir is None
    assert list(tmp_path.iterdir()) == []


def test_hyper_parameters_stand_beside(tmp_path):
    logger = CSVLogger(save_dir=tmp_path, name="here", version="mine")
    logger.log_hyperparams({"lr": 0.1}, run_at(tmp_path))
    logger.log_metrics({"a,b": 1}, 0, run_at(tmp_path))
    logger.flush()

    assert json.loads((tmp_path / "here" / "mine" / "hparams.json").read_text()) == {"lr": 0.1}
    assert rows(tmp_path / "here" / "mine" / "metrics.csv")[0]["a,b"] == "1"


def test_a_named_version_is_appended_to(tmp_path):
    for step in range(2):
        logger = CSVLogger(save_dir=tmp_path, version=3)
        logger.log_metrics({"a": step}, step, run_at(tmp_path))
        logger.flush()

    assert [row["a"] for row in rows(tmp_path / "stratagem_logs" / "version_3" / "metrics.csv")] == ["0", "1"]


def a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    return path


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path):
    steps = []

    class Counts(Net):
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(save_dir=a_file(tmp_path) / "logs")
    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, logger=logger, **QUIET)
    with pytest.raises(ConfigError, match=r"csv.save_dir leads to '.*/file/logs/stratagem_logs', which cannot"):
        trainer.fit(Counts(), joined_batches(1, 8))

    assert steps == []


def test_all_ranks_hear_of_a_folder_that_cannot_be_made(tmp_path):
    said = run_in_processes(_fit_into, 2, a_file(tmp_path))

    assert all("csv.save_dir leads to" in text and text.count("\n") == 0 for text in said), said


def _fit_into(rank, size, folder):
    trainer = sg.Trainer(devices=size, max_epochs=1, logger=CSVLogger(save_dir=folder), **QUIET)
    try:
        trainer.fit(Net(), share(trainer, joined_batches(1, 8)))
    except StratagemError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("step", ["on_fit_start", "log_metrics"])
def test_a_folder_without_permission_is_named(tmp_path, monkeypatch, step):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # the tests may run as root
    logger, run = CSVLogger(), sg.Run(accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"default_root_dir leads to .*no permission to write to {tmp_path}"):
        logger.on_fit_start(run) if step == "on_fit_start" else logger.log_metrics({"a": 1}, 0, run)

    logger.flush()
    assert list(tmp_path.iterdir()) == []


def test_what_only_the_file_system_knows_is_told_by_the_first_metric():
    logger = CSVLogger(save_dir=Path("/proc"))
    with pytest.raises(ConfigError, match=r"csv.save_dir leads to '/proc/stratagem_logs"):
        logger.log_metrics({"a": 1}, 0, run_at(Path.cwd()))

    logger.flush()


def test_a_url_is_refused():
    upath = pytest.importorskip("upath")
    logger = CSVLogger(save_dir=upath.UPath("memory://logs"))
    with pytest.raises(ConfigError, match=r"csv.save_dir leads to '.*logs/stratagem_logs', which .* URL"):
        logger.log_metrics({"a": 1}, 0, run_at(Path.cwd()))
