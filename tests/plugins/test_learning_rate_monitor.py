"""learning_rate_monitor logs the rates that were used, under names that tell groups and optimizers apart."""

from __future__ import annotations

import csv

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import LearningRateMonitor
from stratagem.errors import ConfigError
from stratagem_testing.reference import Gan, Net, Scheduled, joined_batches

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def rows(tmp_path, module, name, **options):
    """Train for two epochs of three batches; return the logged values of column `name` by step."""
    callback = LearningRateMonitor(**options)
    trainer = sg.Trainer(max_epochs=2, callbacks=callback, log_every_n_steps=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, joined_batches(3, 8))
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(lines) if row.get(name)}, callback


def test_as_often_as_the_scheduler_steps(tmp_path):
    logged, _ = rows(tmp_path, Scheduled(), "lr-SGD")
    assert logged == pytest.approx({step: 5e-3 * 0.9 ** (step - 1) for step in range(1, 7)}), "each step's own rate"


def test_an_epoch_has_the_rate_that_it_began_with(tmp_path):
    class ByEpoch(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]

    logged, _ = rows(tmp_path, ByEpoch(), "lr-SGD")
    assert logged == pytest.approx({3: 1e-3, 6: 1e-4})


def test_once_an_epoch_without_a_step_scheduler(tmp_path):
    logged, callback = rows(tmp_path, Net(), "lr-SGD")
    assert logged == pytest.approx({3: 5e-3, 6: 5e-3})
    assert callback.lrs == {"lr-SGD": 5e-3}


class Groups(Net):
    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 2e-3, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)


def test_groups_momentum_and_weight_decay(tmp_path):
    _, callback = rows(tmp_path, Groups(), "lr-AdamW/pg1", log_momentum=True, log_weight_decay=True)
    assert callback.lrs == {
        "lr-AdamW/pg1": 1e-3, "lr-AdamW/pg1-momentum": 0.9, "lr-AdamW/pg1-weight_decay": 0.0,
        "lr-AdamW/pg2": 2e-3, "lr-AdamW/pg2-momentum": 0.9, "lr-AdamW/pg2-weight_decay": 0.1,
    }  # fmt: skip


def test_several_optimizers_of_one_class(tmp_path):
    _, callback = rows(tmp_path, Gan(), "lr-SGD")
    assert sorted(callback.lrs) == ["lr-SGD", "lr-SGD-1"]


class Named(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "name": "rate"}}


def test_a_schedulers_name(tmp_path):
    _, callback = rows(tmp_path, Named(), "rate")
    assert list(callback.lrs) == ["rate"]


def test_without_a_logger_it_would_do_nothing():
    trainer = sg.Trainer(max_epochs=1, callbacks=LearningRateMonitor(), logger=False, **QUIET)
    with pytest.raises(ConfigError, match="learning_rate_monitor has no logger to log to"):
        trainer.fit(Net(), joined_batches(2, 8))


def test_two_groups_of_one_name_are_refused(tmp_path):
    class Twins(Net):
        def configure_optimizers(self):
            parameters = list(self.parameters())
            return torch.optim.SGD([{"params": [each], "name": "twin", "lr": 1e-3} for each in parameters[:2]])

    with pytest.raises(ConfigError, match="would log two parameter groups as 'lr-SGD/twin'"):
        rows(tmp_path, Twins(), "lr-SGD/twin")
