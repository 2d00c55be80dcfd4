"""What a newcomer does first, and what the answer is."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import stratagem as sg
from programs import scripts
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
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


class InAll(Net):
    def test_step(self, batch, batch_idx):
        return None

    predict_step = test_step


class MisspeltCallback(sg.Callback):
    def on_train_epoch_ends(self, trainer):
        raise AssertionError

    def on_my_own(self):
        raise AssertionError


class MisspeltLogger(sg.Logger):
    def log_metric(self, metrics, step):
        raise AssertionError


class LogsAndHelps(sg.Logger):
    def log_metrics(self, metrics, step):
        pass

    def log_metric(self, metric):
        """A method of its own."""


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


def test_a_misspelt_hook_of_a_callback_or_a_logger_is_told(recwarn):
    sg.Trainer(**QUIET | {"logger": MisspeltLogger()}, callbacks=MisspeltCallback()).fit(Net(), BATCHES)
    sg.Trainer(**QUIET | {"logger": LogsAndHelps()}).fit(Net(), BATCHES)

    assert [str(each.message) for each in recwarn] == [
        "callback 'MisspeltCallback' defines on_train_epoch_ends, which nothing calls; did you mean "
        "'on_train_epoch_end'",
        "logger 'MisspeltLogger' defines log_metric, which nothing calls; did you mean 'log_metrics'",
    ]


EMPTY = torch.utils.data.DataLoader(torch.ones(3, 1), 4, drop_last=True)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_loader_without_batches_is_told_once(stage, recwarn):
    trainer = sg.Trainer(**QUIET)
    trainer.fit(InAll(), BATCHES, EMPTY) if stage == "fit" else getattr(trainer, stage)(InAll(), EMPTY)

    name = "validate" if stage == "fit" else stage
    [message] = [str(each.message) for each in recwarn]
    assert message.startswith(
        f"the {name} loader has no batches (3 samples, batch_size=4, drop_last=True): nothing is "
    )


def test_validation_that_is_switched_off_is_not_told(recwarn):
    sg.Trainer(**QUIET, limit_val_batches=0).fit(Net(), BATCHES, EMPTY)
    sg.Trainer(**QUIET).fit(Net(), BATCHES, [])

    assert [str(each.message) for each in recwarn] == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"comm_hook": "fp16"}, "did you mean 'fp16_compress'."),
        ({"comm_hook": "bf16"}, "did you mean 'bf16_compress' or 'bf16_feedback'."),
        ({"strategy": "dpp"}, "did you mean 'ddp' or 'dp'."),
        ({"strategy": "pdd"}, "did you mean 'ddp'."),
        ({"callbacks": "checkpoint"}, "did you mean 'model_checkpoint' or 'on_exception_checkpoint'."),
        ({"logger": "tensorbaord"}, "did you mean 'tensorboard'."),
        ({"max_epoch": 2}, "did you mean 'max_epochs'."),
        ({"precision": "fp16"}, 'or precision="16-true" (everything in fp16).'),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(arguments, hint):
    with pytest.raises(sg.StratagemError) as error:
        sg.Trainer(accelerator="cpu", **arguments)

    assert str(error.value).endswith(hint)


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_lss", "strict": False}}


def test_a_misspelt_monitor_is_told_before_the_first_epoch(recwarn):
    stopping = EarlyStopping("val_los", strict=False)
    trainer = sg.Trainer(**QUIET | {"num_sanity_val_steps": 1, "max_epochs": 1}, callbacks=[stopping])
    trainer.fit(Plateau(), BATCHES, BATCHES)

    assert [str(each.message).partition(". ")[0] for each in recwarn] == [
        "callback 'early_stopping' monitors 'val_los', which the sanity check did not log; did you mean 'val_loss'",
        "ReduceLROnPlateau monitors 'val_lss', which the sanity check did not log; did you mean 'val_loss'",
    ]


@pytest.mark.parametrize("name", ["val_loss", "train_loss", "val_loss2", "accuracy"])
def test_another_metric_that_training_may_log_is_not_told(recwarn, name):
    stopping = EarlyStopping(name, strict=False)
    trainer = sg.Trainer(**QUIET | {"num_sanity_val_steps": 1, "max_epochs": 1}, callbacks=[stopping])
    trainer.fit(Net(), BATCHES, BATCHES)

    assert [str(each.message) for each in recwarn] == []


MISTAKE = """
import stratagem as sg

def main():
    sg.Trainer(strategy="ddp", accelerator="cpu", max_epoch=2)

main()
"""


@pytest.mark.slow
def test_torchrun_ends_with_the_sentence_of_the_error(tmp_path):
    (tmp_path / "train.py").write_text(MISTAKE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    result = scripts.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    sentence = "Trainer has no argument 'max_epoch'; expected one of its arguments; did you mean 'max_epochs'."
    lines = result.stderr.splitlines()

    assert result.returncode == 1
    assert re.search(rf"traceback : ConfigError in main \(.*train.py:\d+\): {re.escape(sentence)}", lines[-2])
    assert "arguments.py" not in result.stderr
    assert sum(line.startswith("ConfigError in main") for line in lines) <= 1


def test_a_variable_of_the_trainer_beside_a_run_is_told(monkeypatch, recwarn):
    monkeypatch.setenv("STRATAGEM_TRAINER_NUM_NODES", "2")
    monkeypatch.setenv("STRATAGEM_TRAINER_MAX_EPOCHS", "2")  # no argument of a Run
    sg.Run(accelerator="cpu")

    assert [str(each.message) for each in recwarn] == [
        "the variable STRATAGEM_TRAINER_NUM_NODES is set, which a Trainer reads and a Run does not; pass num_nodes= to Run"
    ]


@pytest.mark.parametrize(("address", "told"), [("10.0.0.1", 1), ("localhost", 0)])
def test_a_node_of_several_that_would_train_alone_is_told(monkeypatch, recwarn, address, told):
    for variable, value in {"MASTER_ADDR": address, "MASTER_PORT": "29500", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    sg.Trainer(**QUIET).fit(Net(), BATCHES)
    messages = {str(each.message) for each in recwarn}

    assert len(messages) == told
    assert all("num_nodes is 1: this node trains alone. Pass num_nodes=, or unset NODE_RANK" in m for m in messages)


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
