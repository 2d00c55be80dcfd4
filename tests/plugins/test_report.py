"""A run leaves one page about itself: complete, escaped, without secrets, also when it failed or was resumed."""

from __future__ import annotations

import html.parser
import re
import subprocess
from urllib.parse import unquote

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import Report
from stratagem.errors import ConfigError
from stratagem_report.history import Series
from stratagem_report.page import without_copies
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "log_every_n_steps": 1}
BATCHES = joined_batches(6, 8)
EVIL = "<script>alert('you')</script>"


class Described(Net):
    def __init__(self, width=7, api_key="hunter2", note="plain"):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if self.hparams.note != "plain":
            self.log(self.hparams.note, 1.0)
        if self.hparams.note == "fails" and batch_idx == 4:
            raise ArithmeticError(f"no {EVIL}")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]), sync_dist=True)


class Page(html.parser.HTMLParser):
    """What a browser would find on the page."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.text, self.addresses = [], [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "input", "br", "path", "img", "link", "hr", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, "elements overlap"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def page(path):
    found = Page(path.read_text())
    assert found.open == []
    return found, " ".join(" ".join(found.text).split())


def fit(tmp_path, module=None, report=None, **arguments):
    options = QUIET | {"max_epochs": 2, "default_root_dir": tmp_path, "callbacks": [report or Report()]}
    trainer = sg.Trainer(**(options | arguments))
    trainer.fit(module or Described(), BATCHES, BATCHES[:2])
    return trainer


def test_one_page_that_needs_nothing_else(tmp_path):
    trainer = fit(tmp_path)
    found, text = page(tmp_path / "report.html")

    assert found.addresses == ["stratagem_logs/version_0/metrics.csv"]
    assert not re.search(r"https?://(?!www\.w3\.org)", (tmp_path / "report.html").read_text())
    assert [path.name for path in tmp_path.glob("*report*")] == ["report.html"]
    assert found.tags.count("svg") >= 3
    for words in (
        "Described",
        "Finished",
        "max_epochs=2 is reached",
        "loss",
        "val_loss",
        "12",
        f"torch {torch.__version__}",
    ):
        assert words in text or words.split()[-1] in text, words
    assert f"{float(trainer.callback_metrics['val_loss']):.4f}" in text


def test_each_chart_names_both_axes(tmp_path):
    sg.Trainer(max_epochs=2, callbacks=["report"], default_root_dir=tmp_path, **QUIET).fit(Described(), BATCHES)
    page = (tmp_path / "report.html").read_text()
    axes = [re.findall(r'<p class="axis[^"]*">(.*?)</p>', figure) for figure in page.split("<figure")[1:]]

    assert axes == [
        ["loss", "optimizer step"], ["Learning rate", "optimizer step"], ["steps/s", "optimizer step"],
        ["MiB", "optimizer step"],
    ]  # fmt: skip


def test_values_come_with_their_origins_and_plugins_with_their_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATAGEM_TRAINER_GRADIENT_CLIP_VAL", "0.5")
    fit(tmp_path, accumulate_grad_batches=2)
    _, text = page(tmp_path / "report.html")

    assert re.search(r"accumulate_grad_batches 2 code", text)
    assert re.search(r"gradient_clip_val 0.5 environment", text)
    assert re.search(r"single_device.*stratagem-basics 0.1.0", text)


def test_files_are_linked_relative_to_the_page(tmp_path):
    fit(tmp_path, report=Report(path=tmp_path / "pages" / "a.html"), logger=True, enable_checkpointing=True)
    found, text = page(tmp_path / "pages" / "a.html")

    targets = [(tmp_path / "pages" / unquote(address)).resolve() for address in found.addresses]
    assert [path.name for path in targets] == ["epoch=1-step=12.ckpt", "metrics.csv"]
    assert all(path.exists() for path in targets)
    assert "checkpoint" in text


def test_the_page_says_where_the_run_comes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1", "--api_key", "sesame", "--token=sesame"])
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "train.py").write_text("")
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    fit(tmp_path)
    source = (tmp_path / "report.html").read_text()

    assert "train.py --lr 0.1 --api_key" in source
    assert "sesame" not in source
    assert commit[:12] in source
    assert "not committed" not in source


def test_two_metrics_with_the_same_values_have_one_chart():
    series, other = Series(), Series()
    for step in range(5):
        series.add(step, step / 2)
        other.add(step, step / 3)

    groups = {"loss": [("loss", series)], "again": [("again", series)], "accuracy": [("accuracy", other)]}
    assert [title for title, _ in without_copies(groups)] == ["loss", "accuracy"]


def test_nothing_on_the_page_is_executed_and_secrets_stay_secret(tmp_path):
    fit(tmp_path, Described(note=f"{EVIL} s3://me:sesame@there"))
    source = (tmp_path / "report.html").read_text()
    found, text = page(tmp_path / "report.html")

    assert EVIL not in source
    assert EVIL in text  # as a hyper-parameter, and as the name of a metric
    assert found.tags.count("script") == 1
    assert "hunter2" not in source
    assert "sesame" not in source
    assert "api_key" in text


def test_a_run_that_fails_says_how(tmp_path):
    with pytest.raises(ArithmeticError):
        fit(tmp_path, Described(note="fails"))
    source = (tmp_path / "report.html").read_text()
    _, text = page(tmp_path / "report.html")

    assert "ArithmeticError" in text
    assert "training_step" in text
    assert EVIL not in source


def test_every_point_is_drawn_where_there_are_few(tmp_path):
    report = Report()
    fit(tmp_path, report=report, max_epochs=1)
    curve = report._history.metrics["loss"]
    assert len(curve) == curve.values_seen == 6
    assert curve.steps == [1, 2, 3, 4, 5, 6]


def test_a_long_run_keeps_its_extremes_in_little_memory(tmp_path):
    from stratagem_report.history import LIMIT, Series

    series = Series()
    for step in range(100_000):
        series.add(step, 5.0 if step == 31_337 else -2.0 if step == 77_777 else float(step % 7) / 7)
    assert len(series) <= LIMIT
    assert (max(series.highs), min(series.lows)) == (5.0, -2.0)
    assert sum(series.counts) == 100_000
    assert sum(m * c for m, c in zip(series.means, series.counts, strict=True)) / 1e5 == pytest.approx(3 / 7, rel=1e-3)


def test_a_resumed_run_keeps_the_last_values_of_the_earlier_one(tmp_path):
    saving = {"enable_checkpointing": True, "log_every_n_steps": 50, "default_root_dir": tmp_path}
    for epochs in (1, 2, 2):  # the last has nothing left to train
        report = Report()
        trainer = sg.Trainer(**(QUIET | saving), max_epochs=epochs, callbacks=[report])
        trainer.fit(Described(), BATCHES, ckpt_path="last" if epochs > 1 else None)

    assert report._history.state_dict()["metrics"]["loss"]["buckets"][0].tolist() == [1, 6, 7, 12]


def test_a_resumed_run_shows_the_whole_curve(tmp_path):
    first = fit(tmp_path, max_epochs=1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    report = Report()
    trainer = sg.Trainer(**QUIET, max_epochs=2, default_root_dir=tmp_path, callbacks=[report])
    trainer.fit(Described(), BATCHES, BATCHES[:2], ckpt_path=tmp_path / "a.ckpt")

    assert report._history.metrics["loss"].steps == list(range(1, 13))
    assert report._history.resumed == [6]
    assert "2" in page(tmp_path / "report.html")[1]


def _two(rank, world_size, folder):
    trainer = sg.Trainer(
        **QUIET, strategy="ddp", devices=world_size, max_epochs=1, default_root_dir=folder, callbacks=["report"]
    )
    trainer.fit(Described(), share(trainer, BATCHES), share(trainer, BATCHES[:2]))
    return trainer.global_step


def test_of_several_ranks_one_writes(tmp_path):
    assert run_in_processes(_two, 2, str(tmp_path)) == [6, 6]
    assert "ddp" in page(tmp_path / "report.html")[1]
    assert len(list(tmp_path.glob("*.html"))) == 1


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"barebones": True}], ids=str)
def test_a_run_that_writes_nothing_has_no_report(tmp_path, arguments):
    fit(tmp_path, **arguments)
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_costs_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be written .*the run itself is not affected"):
        trainer = fit(tmp_path, report=Report(path=tmp_path / "file" / "report.html"))
    assert trainer.global_step == 12
    with pytest.raises(ConfigError, match="Report.path is 's3://bucket/r.html'; expected a path on this machine"):
        Report(path="s3://bucket/r.html")
