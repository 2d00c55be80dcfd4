"""A checkpoint that an earlier version wrote resumes: what was added since has a default that means "as before".

`python tests/core/test_frozen_checkpoint.py FILE` writes one. Never write this one again: a change that cannot read it
raises the version of the format, `STATE_VERSION`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import EMA, EarlyStopping, ModelCheckpoint, Timer
from stratagem_trainer.progress import ADDED, Position

FROZEN = Path(__file__).parent / "frozen" / "version_2.ckpt"


class Model(sg.Module):
    """Has statistics, dropout, a schedule, metrics and an open accumulation window; `saves` within the second epoch."""

    def __init__(self, saves=None):
        super().__init__()
        torch.manual_seed(5)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(), torch.nn.Linear(3, 1)
        )
        self.saves = saves

    def training_step(self, batch, batch_idx):
        loss = 9 * self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.saves is not None and (self.current_epoch, batch_idx) == (1, 2):
            self.trainer.save_checkpoint(self.saves)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)}


def trained(folder, path=None, saves=None):
    """Return the weights after a fit, its average, and the reached step."""
    sg.seed_everything(1)
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(3)))
    watched = {"monitor": "loss_epoch", "mode": "min"}
    trainer = sg.Trainer(
        max_epochs=3, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=[EMA(decay=0.8), EarlyStopping(**watched, patience=9, check_on_train_epoch_end=True), Timer(),
                   ModelCheckpoint(**watched, dirpath=folder, save_on_train_epoch_end=True)],
    )  # fmt: skip
    model = Model(saves)
    trainer.fit(model, DataLoader(data, 4, shuffle=True), ckpt_path=path)
    return {name: value.clone() for name, value in model.state_dict().items()}, trainer.global_step


def changed(change, folder):
    state = torch.load(FROZEN, weights_only=True)
    change(state)
    torch.save(state, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_it_resumes_exactly(tmp_path):
    expected, step = trained(tmp_path / "whole")
    found, reached = trained(tmp_path / "rest", FROZEN)

    assert step == reached == 9
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_it_lacks_what_was_added_since():
    state = torch.load(FROZEN, weights_only=True)
    added = Position().state_dict().keys() - state["loop"].keys()

    assert added >= {"loss_divisor", "continued_at"}
    assert "batch_sizes" not in state["ranks"][0]["feed"]
    assert "window" in state["ranks"][0]["feed"]
    again = Position(loss_divisor=3.0, continued_at=7, evaluated_batches={"validate": 3})
    again.load_state_dict(state["loop"])
    assert {name: getattr(again, name) for name in added} == {name: getattr(Position(), name) for name in added}


@pytest.mark.parametrize("name", ADDED)
def test_each_added_field_may_be_missing(name, tmp_path):
    path = changed(lambda state: state["loop"].pop(name, None), tmp_path)

    assert trained(tmp_path, path)[1] == 9


@pytest.mark.parametrize("name", ["epoch", "global_step", "batches_done", "epoch_done", "validated"])
def test_what_every_version_wrote_is_required(name, tmp_path):
    path = changed(lambda state: state["loop"].pop(name), tmp_path)
    with pytest.raises(sg.errors.CheckpointError, match=f"loop has no '{name}'"):
        trained(tmp_path, path)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(Path(sys.argv[1]).parent / "run", saves=sys.argv[1])
