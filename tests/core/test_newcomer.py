"""What a newcomer does first, and what the answer is."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigError

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 2,
}
BATCHES = [torch.ones(2, 1)] * 2


class Net(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(sg.DataModule):
    def train_dataloader(self):
        return BATCHES

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1), 2)


class Idle(Net):
    def configure_optimizers(self):
        return None


class Misspelt(Net):
    def on_validation_epoch_ends(self):
        raise AssertionError

    def on_my_own(self):
        raise AssertionError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_class_in_place_of_a_module_is_refused():
    for call in (lambda: sg.Trainer(**QUIET).fit(Net, BATCHES), lambda: sg.Trainer(**QUIET).validate(Net, BATCHES)):
        with pytest.raises(ConfigError, match=r"got the class Net; expected a module; call the class: Net\(...\)"):
            call()


def test_a_fit_without_an_optimizer_says_that_it_trains_nothing():
    with pytest.warns(UserWarning, match="Idle.configure_optimizers returned no optimizer: nothing is trained"):
        sg.Trainer(**QUIET).fit(Idle(), BATCHES)


def test_a_misspelt_event_is_told():
    with pytest.warns(
        UserWarning, match="defines on_validation_epoch_ends, which nothing calls; .*on_validation_epoch_end"
    ):
        sg.Trainer(**QUIET).fit(Misspelt(), BATCHES)


def test_the_data_of_a_fit_are_validated_on_afterwards():
    trainer, data = sg.Trainer(**QUIET), Data()
    trainer.fit(Net(), datamodule=data)
    with_data = trainer.validate(datamodule=data, verbose=False)

    assert trainer.validate(verbose=False) == with_data
    with pytest.raises(ConfigError, match="validate got no loader"):
        trainer.validate(Net())


def test_a_score_of_another_rule_is_forgotten(tmp_path):
    first = sg.Trainer(**QUIET, callbacks=[ModelCheckpoint(monitor="val_loss")])
    first.fit(Net(), datamodule=Data())
    kept = ModelCheckpoint()
    sg.Trainer(**QUIET | {"max_epochs": 3}, callbacks=[kept]).fit(Net(), datamodule=Data(), ckpt_path="last")

    assert "epoch=2" in kept.best_model_path
    assert kept.best_model_score is None
    assert list(kept.written_files()) == ["checkpoint"]


def test_resuming_says_from_where(capsys):
    sg.Trainer(**QUIET).fit(Net(), BATCHES)
    sg.Trainer(**QUIET | {"max_epochs": 3, "enable_progress_bar": True}).fit(Net(), BATCHES, ckpt_path="last")

    assert "resumed from" in (out := capsys.readouterr().out)
    assert "(epoch 1, step 4)" in out


def test_a_mistake_in_yaml_names_its_line(tmp_path):
    (tmp_path / "y.yaml").write_text("max_epochs: 1\nstrategy: ddp\n  devices: 2\n")
    with pytest.raises(ConfigError, match=r"y.yaml is not YAML in line 3, column 10 \("):
        sg.Trainer.from_config(tmp_path / "y.yaml")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"enable_checkpointing": False, "callbacks": ModelCheckpoint()}, "enable_checkpointing is False (code), and "),
        ({"enable_progress_bar": False, "callbacks": ["tqdm"]}, "and callback 'tqdm' is listed; expected one of"),
        ({"enable_model_summary": False, "callbacks": [{"name": "model_summary"}]}, "callback 'model_summary' is lis"),
        ({"enable_checkpointing": False, "plugins": [ModelCheckpoint()]}, "callback 'model_checkpoint' is listed"),
        ({"logger": False, "plugins": ["csv"]}, "logger is False (code), and logger 'csv' is listed"),
        ({"barebones": True, "logger": "csv"}, "barebones is True (code), and logger is 'csv' (code)"),
        ({"barebones": True, "plugins": ["csv"]}, "barebones is True (code), and logger 'csv' is listed"),
        ({"barebones": True, "callbacks": "model_checkpoint"}, "and callback 'model_checkpoint' is listed"),
        ({"barebones": True, "enable_progress_bar": True}, "and enable_progress_bar is True (code)"),
    ],
)
def test_what_an_argument_switches_off_is_not_listed(arguments, text):
    with pytest.raises(ConfigError) as error:
        sg.Trainer(accelerator="cpu", **arguments)

    assert text in str(error.value)


def test_a_module_brings_no_checkpoints_that_are_switched_off():
    class Keeps(Net):
        def configure_callbacks(self):
            return ModelCheckpoint()

    with pytest.raises(ConfigError, match=r"enable_checkpointing is False \(code\), and callback"):
        sg.Trainer(**QUIET, enable_checkpointing=False).fit(Keeps(), BATCHES)
