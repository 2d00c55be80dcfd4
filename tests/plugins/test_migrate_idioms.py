"""Each idiom of Lightning is found; what `stratagem migrate` makes of it runs, or the advice is given."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

import pytest

from stratagem_migrate import examine
from stratagem_migrate.rewriting import rewrite
from stratagem_migrate.source import Source

from . import migrate_idioms as idioms

QUIET = {"accelerator": '"cpu"', "logger": "False", "enable_checkpointing": "False", "enable_progress_bar": "False",
         "enable_model_summary": "False", "max_epochs": "1"}  # fmt: skip
HEAD = """\
import os
import torch
import pytorch_lightning as pl
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def loss(self, batch):
        return self.layer(batch[0]).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("a", loss)
        return loss

    def test_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
"""


def examined(script):
    return examine(Source(Path("a.py"), script.encode()))


def rewritten(script):
    return rewrite(Source(Path("a.py"), script.encode()))


def execute(script, folder, monkeypatch):
    """Run a rewritten script in a folder of its own."""
    assert "lightning." not in script.replace("lightning_utilities", "")
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(script, "a.py", "exec"), {"__name__": "idiom"})


ARGUMENTS = ", ".join(f"{name}={value}" for name, value in QUIET.items())
FIT = f"\n\nmodel = Net()\ntrainer = pl.Trainer({ARGUMENTS})\ntrainer.fit(model, loader, loader)\n"


def test_there_are_about_120_idioms():
    assert sum(map(len, (idioms.TRAINER, idioms.MODULE, idioms.CALLBACK, idioms.SCRIPT, idioms.ADVICE))) >= 120


@pytest.mark.parametrize(("before", "after"), idioms.TRAINER.items(), ids=list(idioms.TRAINER))
def test_arguments_of_a_trainer(before, after, tmp_path, monkeypatch):
    adds = "callbacks=" in after  # perhaps one that an enable_...=False switches off
    names = [name for name in QUIET if f"{name}=" not in f"{before}, {after}" and not (adds and "enable_" in name)]
    quiet = ", ".join(f"{name}={QUIET[name]}" for name in names)
    script = f"import torch\nimport pytorch_lightning as pl\ntrainer = pl.Trainer({before}, {quiet})\n"

    found = examined(script)
    new = rewritten(script)

    assert [each for each in found if each.line == 3 and before.partition("=")[0] in each.old]
    assert after in new, new
    assert before not in new
    cpu = re.sub(r"devices=(-1|\[0\]|2)", "devices=1", new.replace('accelerator="gpu"', 'accelerator="cpu"'))
    execute(cpu, tmp_path, monkeypatch)


@pytest.mark.every_push(
    "def on_fit_start(self):\\n    self.kind = self.trainer.strateg0",
    "def on_fit_start(self):\\n    self.kind = self.trainer.strateg1",
    "def on_train_epoch_end(self):\\n    self.log('a', 1.0, tbptt_p",
    "def on_train_epoch_end(self):\\n    self.log_dict({'a': 1.0}, ",
    "@pl.utilities.rank_zero_only\\ndef on_fit_start(self):\\n    pri",
)
@pytest.mark.parametrize(("before", "after"), idioms.MODULE.items(), ids=[each[:60] for each in idioms.MODULE])
def test_bodies_of_modules(before, after, tmp_path, monkeypatch):
    script = HEAD + "\n" + textwrap.indent(before, "    ") + "\n" + FIT

    found = examined(script)
    new = rewritten(script)

    first = script[: script.index(textwrap.indent(before, "    "))].count("\n") + 1
    assert [each for each in found if each.line >= first and each.certainty == "change"]
    assert textwrap.indent(after, "    ").strip() in new, new
    execute(new, tmp_path, monkeypatch)


@pytest.mark.parametrize(("before", "after"), idioms.CALLBACK.items(), ids=[each[:60] for each in idioms.CALLBACK])
def test_bodies_of_callbacks(before, after, tmp_path, monkeypatch):
    body = textwrap.indent(before, "    ")
    fit = FIT.replace("pl.Trainer(", "pl.Trainer(callbacks=[Mine()], ")
    script = f"{HEAD}\n\nclass Mine(pl.Callback):\n{body}\n{fit}"

    new = rewritten(script)

    if "rank_zero" in before:
        assert textwrap.indent(after, "    ").strip() in new, new
    execute(new, tmp_path, monkeypatch)


@pytest.mark.every_push(
    "trainer.validate(model, val_dataloaders=loader)",
    "pl.seed_everything(1, verbose=False)",
    "print(trainer.training_type_plugin)",
    "from lightning.fabric.utilities.apply_func import apply_to_c",
)
@pytest.mark.parametrize(("before", "after"), idioms.SCRIPT.items(), ids=[each[:60] for each in idioms.SCRIPT])
def test_statements(before, after, tmp_path, monkeypatch):
    script = f"{HEAD}{FIT}{before}\n"

    found = examined(script)
    new = rewritten(script)

    assert [each for each in found if each.line > f"{HEAD}{FIT}".count("\n") and each.certainty == "change"]
    assert after in new, new
    execute(new, tmp_path, monkeypatch)


@pytest.mark.parametrize(("before", "certainty", "advice"), idioms.ADVICE, ids=[each[0][:60] for each in idioms.ADVICE])
def test_what_is_left_to_the_user_comes_with_advice(before, certainty, advice):
    script = f"import pytorch_lightning as pl\n{before}\n"

    after = rewritten(script)

    for text in (script, after):
        found = [each for each in examined(text) if each.certainty == certainty and each.new.startswith(advice)]
        assert [each for each in found if each.new or each.note], text
