"""What users of Lightning write without a second thought works here."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from attrs import define
from torch import nn

import stratagem as sg
from stratagem.callbacks import LambdaCallback, LearningRateMonitor, Timer
from stratagem.errors import ConfigError

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class Net(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count=3):
    return [torch.ones(2, 4) for _ in range(count)]


def test_what_a_module_caches_in_the_sanity_check_can_be_trained_with():
    class Caches(Net):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.linspace(1, 2, 2)[:, None]
            return self.layer(x) * self.table

        def training_step(self, batch, batch_idx):
            return self(batch).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self(batch).square().mean())

    trainer = sg.Trainer(max_epochs=2, **QUIET)
    trainer.fit(Caches(), batches(), batches(1))
    assert trainer.global_step == 6


def test_a_callback_logs():
    class Mine(sg.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.log("seen", float(batch_idx), True, on_epoch=True)

        def on_validation_epoch_end(self, trainer, module):
            self.log_dict({"a": 1.0, "b": 2.0})

    @define(kw_only=True)
    class Equal(sg.Callback):
        """As attrs makes it: equal to another with the same options, and not hashable."""

        def on_train_start(self, trainer, module):
            self.log("equal", 3.0)

    callback = Mine()
    with pytest.raises(ConfigError, match=r"Mine\.log was called outside a run"):
        callback.log("seen", 1.0)
    trainer = sg.Trainer(max_epochs=1, callbacks=[callback, Equal()], **QUIET)
    trainer.fit(Net(), batches(), batches(1))
    found = {name: float(trainer.callback_metrics[name]) for name in ("seen_step", "seen_epoch", "a", "b", "equal")}
    assert found == {"seen_step": 2.0, "seen_epoch": 1.0, "a": 1.0, "b": 2.0, "equal": 3.0}


def test_metrics_of_an_epoch_can_be_read_at_its_end():
    seen = {}

    class Reads(Net):
        def on_train_epoch_end(self):
            seen["train"] = float(self.trainer.callback_metrics["loss_epoch"])
            self.log("twice", 2 * seen["train"])

        def on_validation_epoch_end(self):
            seen["validation"] = float(self.trainer.callback_metrics["val_loss"])

    trainer = sg.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(Reads(), batches(), batches(2))
    assert seen["train"] == float(trainer.callback_metrics["loss_epoch"])
    assert seen["validation"] == float(trainer.callback_metrics["val_loss"])
    assert float(trainer.callback_metrics["twice"]) == 2 * seen["train"]


def test_a_trial_run_validates_whatever_the_limits_say():
    trainer = sg.Trainer(fast_dev_run=True, limit_val_batches=0, **QUIET)
    trainer.fit(Net(), batches(), batches())
    assert "val_loss" in trainer.callback_metrics


def test_without_validation_its_interval_may_be_longer_than_an_epoch():
    trainer = sg.Trainer(max_epochs=1, limit_val_batches=0, val_check_interval=100, **QUIET)
    trainer.fit(Net(), batches(), batches())
    assert trainer.global_step == 3
    with pytest.raises(ConfigError, match="val_check_interval is 100"):
        sg.Trainer(max_epochs=1, val_check_interval=100, **QUIET).fit(Net(), batches(), batches())


def test_a_duration_is_given_as_that_of_a_timedelta():
    trainer = sg.Trainer(max_time={"minutes": 0}, callbacks=[Timer(duration={"hours": 1})], **QUIET)
    trainer.fit(Net(), batches())
    assert trainer.global_step == 0
    assert trainer._state.max_time == timedelta()
    with pytest.raises(ConfigError, match="max_time"):
        sg.Trainer(max_time={"moments": 5}, **QUIET)


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer.max_epochs = 2
    trainer.fit(Net(), batches(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert trainer.global_step == 6
    assert isinstance(Net.load_from_checkpoint(tmp_path / "saved.ckpt", weights_only=True), Net)
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(ConfigError, match="got weights_only=False; expected None or True"):
            call(Net(), batches(), weights_only=False)
    with pytest.raises(ConfigError, match="load_from_checkpoint got weights_only=False"):
        Net.load_from_checkpoint(tmp_path / "saved.ckpt", weights_only=False)


def test_functions_are_given_by_the_name_of_their_event():
    seen = []
    callback = LambdaCallback(on_fit_end=lambda trainer, module: seen.append(trainer.global_step))
    sg.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(Net(), batches())
    assert seen == [3]


def test_a_group_of_parameters_is_logged_by_its_own_name(tmp_path):
    class Groups(Net):
        def configure_optimizers(self):
            groups = [{"params": [self.layer.weight], "name": "weights"}, {"params": [self.layer.bias]}]
            return torch.optim.SGD(groups, lr=0.1)

    monitor = LearningRateMonitor()
    arguments = QUIET | {"logger": "csv", "default_root_dir": tmp_path}
    sg.Trainer(max_epochs=1, callbacks=[monitor], **arguments).fit(Groups(), batches())
    assert sorted(monitor.lrs) == ["lr-SGD/pg2", "lr-SGD/weights"]


def test_a_data_module_gets_the_batch_size_of_from_datasets():
    class Data(sg.DataModule):
        def __init__(self, batch_size=1):
            self.batch_size = batch_size

    assert Data.from_datasets(batches(), batch_size=3).batch_size == 3


def test_a_module_is_frozen_and_its_own_optimizers_are_torchs():
    class ByHand(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            assert type(optimizer) is torch.optim.SGD
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().mean())
            optimizer.step()

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(ByHand(), batches())
    assert trainer.global_step == 3
    assert not any(parameter.requires_grad for parameter in Net().freeze().parameters())


def test_rank_zero_prints_and_warns(capsys, monkeypatch):
    with pytest.warns(UserWarning, match="odd") as caught:
        sg.rank_zero_warn("odd")
    assert caught[0].filename == __file__
    sg.rank_zero_info("at %d", 3)
    monkeypatch.setenv("RANK", "1")
    sg.rank_zero_info("elsewhere")
    assert capsys.readouterr().out == "at 3\n"
