"""`stratagem report` draws the curves of a run from its metrics.csv, over all fits that it was resumed in."""

from __future__ import annotations

import argparse
import json
import re
from html import unescape

import pytest

import stratagem as sg
from stratagem.callbacks import Report
from stratagem.errors import ConfigError
from stratagem_report.command import ReportCommand
from stratagem_report.curves import files, joined
from stratagem_testing.reference import Net, joined_batches

QUIET = {"enable_progress_bar": False, "accelerator": "cpu", "log_every_n_steps": 1}
BATCHES = joined_batches(4, 8)


def report(*words):
    command, parser = ReportCommand(), argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


def fit(folder, max_epochs=2, ckpt_path=None, callbacks=()):
    keep_all = {"name": "model_checkpoint", "save_top_k": -1}
    trainer = sg.Trainer(
        max_epochs=max_epochs,
        default_root_dir=folder,
        callbacks=[keep_all, *callbacks],
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(Net(), BATCHES, BATCHES[:1], ckpt_path=ckpt_path)


def checkpoint(folder, step):
    (path,) = (folder / "checkpoints").glob(f"*step={step}.ckpt")
    return path


def write(folder, version, text):
    path = folder / "stratagem_logs" / version / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def curves(path):
    """Return the steps of each curve on a page, by chart and name."""
    found = {}
    for figure in path.read_text().split("<figure")[1:]:
        title = re.search("<h3>(.*?)</h3>", figure)[1]
        drawn = json.loads(unescape(re.search('data-curves="(.*?)"', figure)[1]))
        found[title] = {each["name"]: each["x"] for each in drawn}
    return found


def test_a_run_that_was_resumed_is_one_curve(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "digits"
    fit(folder)
    fit(folder, max_epochs=3, ckpt_path="last")
    capsys.readouterr()
    monkeypatch.chdir(folder)

    assert report() == 0
    page = folder / "report.html"
    assert capsys.readouterr().out == f"drawn: version_0, version_1; resumed at step 8\n{page}\n"
    assert curves(page) == {"loss": {"train_loss": [*range(1, 13)], "val_loss": [4, 8, 12]}}
    text = page.read_text()
    assert text.count('class="resumed"') == 1
    assert "<title>digits: curves</title>" in text
    assert "script-src 'sha256-" in unescape(text)
    row = re.search('<th scope="row">val_loss</th>(.*?)</tr>', text)[1]
    assert re.findall("<small>(.*?)</small>", row) == ["step 12", "step 4"]  # the lowest and the highest


def test_a_run_resumed_before_its_last_step_has_the_curves_that_its_own_report_has(tmp_path):
    fit(tmp_path, callbacks=["learning_rate_monitor", Report()])  # the monitor logs before the first step, too
    own = Report()
    fit(tmp_path, ckpt_path=checkpoint(tmp_path, 4), callbacks=["learning_rate_monitor", own])

    history = joined(files(tmp_path))[0]
    assert history.resumed == own._history.resumed == [4]
    assert history.first_step == own._history.first_step
    assert history.metrics.keys() == own._history.metrics.keys() == {"train_loss", "val_loss", "lr-SGD"}
    for name, series in own._history.metrics.items():
        assert (history.metrics[name].steps, history.metrics[name].means) == (series.steps, series.means)
        assert history.metrics[name].stage == series.stage


def test_a_version_that_begins_again_is_another_run(tmp_path, capsys):
    fit(tmp_path, max_epochs=1)
    fit(tmp_path, max_epochs=1)
    capsys.readouterr()

    assert report(tmp_path) == 0
    assert capsys.readouterr().out.startswith("drawn: version_1; not drawn, earlier runs: version_0\n")
    assert curves(tmp_path / "report.html")["loss"]["train_loss"] == [1, 2, 3, 4]


def test_a_page_of_the_callback_is_kept_and_its_own_is_replaced(tmp_path):
    fit(tmp_path, max_epochs=1, callbacks=[Report()])
    of_the_callback = (tmp_path / "report.html").read_text()
    version = tmp_path / "stratagem_logs" / "version_0"
    for folder in (tmp_path, version, version / "metrics.csv"):
        assert report(folder) == 0

    assert (tmp_path / "report.html").read_text() == of_the_callback
    assert curves(tmp_path / "curves.html") == curves(version / "report.html") != {}
    assert not (version / "curves.html").exists()


def test_versions_are_read_by_number_and_training_is_drawn_first(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for number, first in {11: 10, 2: 2, 10: 10}.items():  # a run that was resumed twice from the same checkpoint
        text = f"epoch,step,val_loss,train_loss\n0,{first},,1.5\n0,{first + number},2.5,nan\n"
        write(tmp_path, f"version_{number}", text)
    page = tmp_path / "pages" / "one.html"

    assert report(tmp_path / "stratagem_logs", "--out", page, "--open") == 0
    assert opened == [page.as_uri()]
    assert curves(page) == {"loss": {"train_loss": [2, 10], "val_loss": [4, 21]}}
    assert list(curves(page)["loss"]) == ["train_loss", "val_loss"]
    assert joined(files(tmp_path))[0].resumed == [9]


def test_a_line_that_a_run_is_writing_is_left_out(tmp_path):
    write(tmp_path, "version_0", "epoch,step,loss\n0,1,1.5\n0,2,1.2")
    write(tmp_path, "version_1", "epoch,step,loss\n")

    assert joined(files(tmp_path))[0].metrics["loss"].steps == [1]


def test_an_evaluation_without_a_fit_adds_nothing_to_a_curve(tmp_path):
    fit(tmp_path, max_epochs=1)
    trainer = sg.Trainer(max_epochs=2, default_root_dir=tmp_path, **QUIET)
    trainer.validate(Net(), BATCHES[:1])
    trainer.fit(Net(), BATCHES, ckpt_path=checkpoint(tmp_path, 4))
    trainer = sg.Trainer(default_root_dir=tmp_path, **QUIET)
    trainer.test(Net(), BATCHES[:1])
    trainer.logger.save()

    history, sources = joined(files(tmp_path))
    assert sources == "drawn: version_0, version_1, version_2; resumed at step 4"
    assert history.metrics["train_loss"].steps == [*range(1, 9)]
    assert history.metrics["val_loss"].steps == [4]
    assert history.results.keys() == {"test_loss"}
    write(tmp_path, "version_3", "epoch,step,train_loss\n2,9,1.5\n")
    assert joined(files(tmp_path))[0].results == {}  # as they are of an earlier step


def test_steps_that_a_user_logs_without_epochs_are_drawn(tmp_path):
    write(tmp_path, "version_0", "step,accuracy\n0,0.1\n20,0.4\n10,0.2\n")
    write(tmp_path, "version_1", "step,accuracy\n30,0.5\n")

    history, _ = joined(files(tmp_path))
    assert history.metrics["accuracy"].means == [0.1, 0.2, 0.4, 0.5]
    assert history.resumed == [29]


def test_what_cannot_be_drawn_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has no metrics.csv; expected the folder of one run.*; pass the default_root"
    ):
        report(tmp_path)
    write(tmp_path / "first", "version_0", "time,loss\n0,1\n")
    with pytest.raises(ConfigError, match="metrics.csv has no column 'step'; expected a file of the logger csv"):
        report(tmp_path / "first")
    write(tmp_path / "text", "version_0", "epoch,step,loss\n0,1,good\n")
    with pytest.raises(ConfigError, match="metrics.csv has text among its numbers .*'good'"):
        report(tmp_path / "text")
    write(tmp_path, "version_0", "epoch,step,loss\n0,1,1.5\n")
    (tmp_path / "stratagem_logs").rename(tmp_path / "digits")
    write(tmp_path, "version_0", "epoch,step,loss\n0,1,1.5\n")
    with pytest.raises(
        ConfigError, match=r"has metrics of .*digits, .*stratagem_logs; expected .*; pass the default_root"
    ):
        report(tmp_path)
