"""model_checkpoint and early_stopping act when an epoch is complete, unless it is validated at other times."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.errors import ConfigError

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
#: The training metric of each epoch.
LOSS = [5.0, 1.0, 3.0, 2.0]


class Epochs(sg.Module):
    """Logs while an epoch is trained, validated and ended; counts ends in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.register_buffer("ended", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.log("train", LOSS[self.current_epoch], on_step=True, on_epoch=True)
        return (3 * self.net(batch[0])).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())

    def on_train_epoch_end(self):
        self.ended += 1
        self.log("end", float(self.current_epoch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.003, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_epoch"}}


class Later(sg.Callback):
    """Logs at the end of an epoch; listed after what monitors it."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("later", -float(trainer.current_epoch))


def loader():
    return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), 4, shuffle=True)


def fit(callbacks, validates=True, ckpt_path=None, **arguments):
    sg.seed_everything(1)
    trainer = sg.Trainer(**QUIET | {"max_epochs": 4, "callbacks": [*callbacks, Later()]} | arguments)
    trainer.fit(Epochs(), loader(), loader() if validates else None, ckpt_path=ckpt_path)
    return trainer


def saved(folder):
    """Return (step, ends of epochs) of each checkpoint."""
    states = [torch.load(path) for path in folder.glob("*.ckpt")]
    return sorted((state["loop"]["global_step"], int(state["state_dict"]["ended"])) for state in states)


EACH_EPOCH = [(4, 1), (8, 2), (12, 3), (16, 4)]


# What Lightning 2.6.6 does with these arguments, but for the last row, where it would save nothing.
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, EACH_EPOCH), ({"validates": False}, EACH_EPOCH), ({"limit_val_batches": 0}, EACH_EPOCH),
        ({"validates": False, "val_check_interval": 0.5}, EACH_EPOCH), ({"val_check_interval": 1}, EACH_EPOCH),
        ({"max_steps": 6}, [(4, 1), (6, 2)]),
        ({"val_check_interval": 0.5}, [(2, 0), (4, 0), (6, 1), (8, 1), (10, 2), (12, 2), (14, 3), (16, 3)]),
        ({"val_check_interval": 4}, [(4, 0), (8, 1), (12, 2), (16, 3)]),
        ({"check_val_every_n_epoch": 2}, [(8, 1), (16, 3)]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 6}, [(6, 1), (12, 2)]),
        ({"val_check_interval": {"seconds": 0}, "max_epochs": 1}, [(1, 0), (2, 0), (3, 0), (4, 0)]),
        ({"validates": False, "check_val_every_n_epoch": 2}, EACH_EPOCH),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_is_that_of_the_whole_epoch(tmp_path, arguments, expected):
    fit([ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)], **arguments)

    assert saved(tmp_path) == expected


@pytest.mark.parametrize(
    ("monitor", "best"), [("train", 1), ("train_epoch", 1), ("end", 0), ("later", 3), ("val", None)]
)
def test_what_the_end_of_the_epoch_logs_can_be_monitored(tmp_path, monitor, best):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor=monitor, filename="{epoch}-{train_epoch:.0f}", save_top_k=-1)
    stopping = EarlyStopping(monitor, patience=2)
    trainer = fit([stopping, checkpoint])

    assert {path.name for path in tmp_path.glob("*.ckpt")} >= {
        "epoch=0-train_epoch=5.ckpt",
        "epoch=1-train_epoch=1.ckpt",
    }
    if best is not None:
        assert checkpoint.best_model_path.endswith(f"epoch={best}-train_epoch={LOSS[best]:.0f}.ckpt")
        assert trainer.current_epoch == min(4, best + 3)


def test_within_an_epoch_the_monitor_is_that_of_the_last_step(tmp_path):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="train", save_top_k=-1)
    fit([checkpoint], val_check_interval=0.5)

    assert list(checkpoint.best_k_models.values()) == [loss for loss in LOSS for _ in range(2)]


@pytest.mark.parametrize("callback", [ModelCheckpoint(monitor="train_epoch"), EarlyStopping("train_epoch")], ids=str)
def test_a_metric_that_the_end_of_the_epoch_logs_too_late_names_the_option(tmp_path, callback):
    with pytest.raises(ConfigError, match="'train_epoch', which nobody logged; .*_on_train_epoch_end=True"):
        fit([callback], val_check_interval=0.5, default_root_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}], ids=str)
@pytest.mark.parametrize("average", [[], ["ema"]], ids=str)
def test_a_run_resumed_from_the_end_of_an_epoch_equals_one_that_was_not_stopped(tmp_path, arguments, average):
    def callbacks(folder, saves=True):
        each = ModelCheckpoint(
            dirpath=tmp_path / folder, save_top_k=-1, filename="{step}", enable_version_counter=False
        )
        return [EarlyStopping("train_epoch", patience=3, check_on_train_epoch_end=True), each, *average]

    def told(trainer):
        stopping = trainer.early_stopping_callback
        state = trainer.lightning_module.state_dict()
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        return state, metrics, rates, stopping.wait_count, stopping.best_score, trainer.global_step

    whole = told(fit(callbacks("whole"), **arguments))
    files = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(files) >= 2
    for file in files:
        resumed = told(fit(callbacks(file.stem), ckpt_path=file, **arguments))
        assert resumed[1:] == whole[1:], file
        assert all(torch.equal(value, whole[0][name]) for name, value in resumed[0].items()), file


def test_an_epoch_that_is_cut_short_is_not_saved_by_an_earlier_validation(tmp_path):
    keep = ModelCheckpoint(dirpath=tmp_path, monitor="val", save_top_k=-1, filename="{step}")
    fit([keep], max_steps=10)  # two epochs of four steps, and a half

    assert saved(tmp_path) == [(4, 1), (8, 2)]
