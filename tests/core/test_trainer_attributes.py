"""What a trainer tells its modules and callbacks, under the names of Lightning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches
from stratagem_trainer.api.user_view import UserView

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Asks(Net):
    """Reads in configure_optimizers what a schedule needs."""

    def configure_optimizers(self):
        self.total = self.trainer.estimated_stepping_batches
        self.loader = self.trainer.train_dataloader
        return super().configure_optimizers()


def loader(samples, batch_size=4):
    return DataLoader(TensorDataset(*data(samples)), batch_size)


# --- How long training is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9),
        ({"max_epochs": 3, "accumulate_grad_batches": {0: 1, 1: 3}}, 9),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 3, "limit_train_batches": 0.5, "accumulate_grad_batches": 2}, 3),
        ({"max_epochs": 3, "overfit_batches": 1}, 3),
        ({"fast_dev_run": 2}, 2),
        ({"max_steps": 7}, 7),
    ],
)
def test_it_knows_the_steps_of_a_fit_while_optimizers_are_made(arguments, expected):
    module, trainer = Asks(), sg.Trainer(**(QUIET | arguments))

    trainer.fit(module, loader(20))

    assert module.total == expected == trainer.global_step
    assert trainer.estimated_stepping_batches == expected


def test_without_a_limit_or_a_length_steps_are_infinite():
    module = Asks()
    trainer = sg.Trainer(max_epochs=-1, max_time=30, **QUIET)
    trainer.fit(module, _Endless(stop_after=3, trainer=trainer))
    assert module.total == math.inf

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, iter(joined_batches(2, 8)))
    assert module.total == math.inf


class _Endless:
    def __init__(self, stop_after, trainer):
        self.stop_after, self.trainer = stop_after, trainer

    def __iter__(self):
        for number, batch in enumerate(joined_batches(20, 80)):
            self.trainer.should_stop = number >= self.stop_after
            yield batch


def test_it_is_an_error_before_a_fit():
    with pytest.raises(ConfigError, match="estimated_stepping_batches was read before a fit.*in configure_optimizers"):
        sg.Trainer(**QUIET).estimated_stepping_batches  # noqa: B018


def test_a_second_fit_asks_its_own_loader():
    module, trainer = Asks(), sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, loader(20))
    trainer.max_epochs = 2
    second = loader(8)
    trainer.fit(module, second)
    assert module.total == 4
    assert module.loader is second is trainer.train_dataloader


def _steps_of_two(rank, world_size):
    module = Asks()
    trainer = sg.Trainer(max_epochs=2, devices=2, strategy="ddp", **QUIET)
    trainer.fit(module, loader(24))
    return module.total, trainer.global_step


def test_several_ranks_divide_the_batches():
    assert run_in_processes(_steps_of_two, 2) == [(6, 6), (6, 6)]


# --- The call ----------------------------------------------------------------------------------------------------


class Looks(sg.Callback):
    """Remembers what the trainer says in each stage."""

    def __init__(self):
        self.seen = {}

    def look(self, where, trainer):
        names = ("training", "validating", "testing", "predicting", "evaluating", "sanity_checking")
        self.seen[where] = (trainer.state.fn, trainer.state.stage, [name for name in names if getattr(trainer, name)])

    @sg.hookimpl
    def on_train_batch_end(self, trainer):
        self.look("train", trainer)

    @sg.hookimpl
    def on_validation_batch_end(self, trainer):
        self.look("sanity" if trainer.sanity_checking else "validation", trainer)

    @sg.hookimpl
    def on_test_batch_end(self, trainer):
        self.look("test", trainer)

    @sg.hookimpl
    def on_predict_batch_end(self, trainer):
        self.look("predict", trainer)


class Evaluates(Net):
    def validation_step(self, batch, batch_idx):
        pass

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def test_it_tells_the_call_and_the_stage():
    looks = Looks()
    trainer = sg.Trainer(max_epochs=1, callbacks=[looks], **QUIET)
    before = trainer.state
    assert (before.fn, before.status, before.stage, before.finished, before.stopped) == (
        None, "initializing", None, False, False,
    )  # fmt: skip

    trainer.fit(Evaluates(), loader(8), loader(4))
    assert (trainer.state.fn, trainer.state.finished, trainer.state.stage) == ("fit", True, None)
    trainer.validate(dataloaders=loader(4))
    trainer.test(dataloaders=loader(4))
    trainer.predict(dataloaders=loader(4))

    assert looks.seen == {
        "sanity": ("fit", "sanity_check", ["evaluating", "sanity_checking"]),
        "train": ("fit", "train", ["training"]),
        "validation": ("validate", "validate", ["validating", "evaluating"]),
        "test": ("test", "test", ["testing", "evaluating"]),
        "predict": ("predict", "predict", ["predicting"]),
    }


def test_validation_within_training_is_not_training():
    looks = Looks()
    sg.Trainer(max_epochs=1, callbacks=[looks], num_sanity_val_steps=0, **QUIET).fit(Evaluates(), loader(8), loader(4))
    assert looks.seen["validation"] == ("fit", "validate", ["validating", "evaluating"])
    assert looks.seen["train"] == ("fit", "train", ["training"])


def test_a_call_that_ended_with_an_error_was_interrupted():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Breaks(), loader(8))
    assert (trainer.state.status, trainer.interrupted, trainer.state.stopped) == ("interrupted", True, True)

    trainer.fit(Net(), loader(8))
    assert (trainer.state.status, trainer.interrupted) == ("finished", False)


# --- Loaders, plugins, settings ----------------------------------------------------------------------------------


def test_it_has_the_loaders_of_each_stage(tmp_path):
    train, first, second = loader(8), loader(4), loader(12)
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    assert (trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders) == (None, None, None)

    trainer.fit(Evaluates(), train, first)
    assert (trainer.train_dataloader, trainer.val_dataloaders) == (train, first)
    trainer.test(dataloaders=[first, second])
    trainer.predict(dataloaders=second)
    assert (trainer.test_dataloaders, trainer.predict_dataloaders) == ([first, second], second)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    trainer.validate(dataloaders=second, ckpt_path=path)
    assert (trainer.val_dataloaders, trainer.ckpt_path) == (second, path)
    assert trainer.model is trainer.module


def test_it_has_the_arguments_it_was_given():
    given = {
        "limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1, "limit_predict_batches": 2,
        "num_sanity_val_steps": 1, "val_check_interval": 2, "check_val_every_n_epoch": 4, "log_every_n_steps": 5,
        "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "min_epochs": 1, "min_steps": 2,
    }  # fmt: skip
    trainer = sg.Trainer(**(QUIET | given))
    assert {name: getattr(trainer, name) for name in given} == given
    assert (trainer.num_nodes, trainer.num_devices, trainer.device_ids) == (1, 1, [0])
    assert trainer.accelerator is trainer.run.accelerator


def test_it_has_the_first_callback_that_stops_and_that_saves(tmp_path):
    stops, saves = EarlyStopping(monitor="loss"), ModelCheckpoint()
    arguments = QUIET | {"enable_checkpointing": True}
    trainer = sg.Trainer(callbacks=[stops, saves], default_root_dir=tmp_path, **arguments)
    assert (trainer.early_stopping_callback, trainer.checkpoint_callback) == (stops, saves)
    assert (trainer.early_stopping_callbacks, trainer.checkpoint_callbacks) == ([stops], [saves])
    without = sg.Trainer(**QUIET)
    assert (without.early_stopping_callback, without.checkpoint_callback) == (None, None)


def test_it_has_the_folder_of_the_logger(tmp_path):
    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, log_every_n_steps=1, **(QUIET | {"logger": "csv"}))
    assert trainer.log_dir == str(tmp_path)
    trainer.fit(Net(), loader(8))
    assert Path(trainer.log_dir, "metrics.csv").exists()
    assert sg.Trainer(default_root_dir=tmp_path, **QUIET).log_dir == str(tmp_path)


# --- Attributes of Lightning's that are not here, and what loads ----------------------------------------------------


def test_an_attribute_of_lightnings_that_is_not_here_says_what_to_use():
    trainer = sg.Trainer(**QUIET)

    with pytest.raises(AttributeError, match=r"Trainer has no attribute 'scaler'; use trainer.precision$"):
        print(trainer.scaler)
    with pytest.raises(AttributeError, match="Trainer has no attribute 'no_such'$"):
        print(trainer.no_such)
    assert not hasattr(trainer, "root_gpu")


class Positions(Net):
    def __init__(self):
        super().__init__()
        self.last = []

    def on_train_batch_end(self):
        self.last.append(self.trainer.is_last_batch)


class StepsItsScheduler(Net):
    """Steps its schedulers in the last batch of each epoch, as Lightning's guide to manual optimization shows."""

    def __init__(self, automatic=False):
        super().__init__()
        self.automatic_optimization, self.last = automatic, []

    def on_train_epoch_start(self):
        self.last.append(self.trainer.is_last_batch)

    def on_train_batch_start(self):
        self.last.append(self.trainer.is_last_batch)

    def training_step(self, batch, batch_idx):
        self.last.append(self.trainer.is_last_batch)
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("automatic", [False, True])
def test_a_step_knows_that_its_batch_is_the_last(automatic):
    trainer, module = sg.Trainer(**QUIET, max_epochs=2), StepsItsScheduler(automatic)
    trainer.fit(module, loader(12))

    assert module.last == [False, False, False, False, False, True, True] * 2
    assert module.lr_schedulers().get_last_lr() == [pytest.approx(0.025)]


def test_it_knows_the_last_batch_and_the_batches_of_the_sanity_check():
    trainer, module = sg.Trainer(**QUIET, max_epochs=2, num_sanity_val_steps=3), Positions()
    module.validation_step = lambda batch, batch_idx: None
    trainer.fit(module, loader(12), [loader(8), loader(40)])

    assert module.last == [False, False, True] * 2
    assert trainer.num_sanity_val_batches == [2, 3]
    assert trainer.lightning_module is module
    assert module.dtype == torch.float32
    assert module.double().dtype == torch.float64


class Wide(Net):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()


def test_a_module_is_loaded_by_lightnings_arguments(tmp_path):
    trainer, module = sg.Trainer(**QUIET, max_epochs=1), Wide(width=5)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(filepath=tmp_path / "x.ckpt")

    again = Wide.load_from_checkpoint(checkpoint_path=tmp_path / "x.ckpt", map_location="cpu")
    assert again.hparams.width == 5
    assert Wide.load_from_checkpoint(tmp_path / "x.ckpt", torch.device("meta")).device.type == "meta"
    with pytest.raises(ConfigError, match="got map_location=.*; expected a device"):
        Wide.load_from_checkpoint(tmp_path / "x.ckpt", map_location=lambda storage, _: storage)
    with pytest.raises(ConfigError, match="got hparams_file; expected arguments of __init__; pass"):
        Wide.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file="h.yaml")


class Named(sg.DataModule):
    def __init__(self, name=""):
        self.name = name


def test_a_data_module_is_made_from_data_sets():
    made = Named.from_datasets(
        data(12)[0], val_dataset=[data(8)[0], data(4)[0]], predict_dataset=data(4)[0], batch_size=4, name="mine"
    )
    train, (first, second) = made.train_dataloader(), made.val_dataloader()

    assert made.name == "mine"
    assert isinstance(train.sampler, torch.utils.data.RandomSampler)
    assert isinstance(first.sampler, torch.utils.data.SequentialSampler)
    assert [len(each) for each in (train, first, second, made.predict_dataloader())] == [3, 2, 1, 1]
    with pytest.raises(ConfigError, match="Named has no test_dataloader"):
        made.test_dataloader()
    trainer = sg.Trainer(**QUIET)
    assert len(trainer.predict(Net(), datamodule=made)) == 1


class Foreign(sg.Callback):
    """Has attributes that callbacks with checkpoints and early stopping have, too, with other meanings."""

    folder, best_model_path, stopped_epoch, saved_on_signal = "figures", "", 0, True


def test_a_callback_has_the_roles_that_it_declares(tmp_path):
    trainer = sg.Trainer(
        max_epochs=1, callbacks=[Foreign()], default_root_dir=tmp_path, accelerator="cpu", logger=False
    )
    trainer.fit(Net(), loader(8))

    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    assert trainer.early_stopping_callback is None
    again = sg.Trainer(max_epochs=2, callbacks=[Foreign()], default_root_dir=tmp_path, accelerator="cpu", logger=False)
    again.fit(Net(), loader(8), ckpt_path="last")
    assert again.global_step == 4


def test_metrics_are_those_of_the_latest_call():
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    module = Net()
    trainer.fit(module, loader(8), loader(8))
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)

    trainer.test(module, loader(8))
    assert set(trainer.callback_metrics) == {"test_loss"}


class FromHooks(Net):
    def on_train_start(self):
        self.log("at_start", 1.0)

    def on_train_epoch_start(self):
        self.log("at_epoch_start", 2.0)


class Rows(sg.Logger):
    def __init__(self):
        self.rows = []

    @sg.hookimpl
    def log_metrics(self, metrics, step):
        self.rows.append((step, set(metrics) - {"epoch"}))


@pytest.mark.parametrize(("every", "steps"), [(50, [1, 5]), (2, [1, 2, 4, 5]), (5, [1, 5])])
def test_the_first_and_the_last_step_of_a_fit_are_logged(every, steps):
    logger = Rows()
    options = QUIET | {"logger": logger, "log_every_n_steps": every}
    sg.Trainer(max_epochs=1, **options).fit(FromHooks(), loader(20))

    assert [step for step, names in logger.rows if "train_loss" in names] == steps
    assert {"at_start", "at_epoch_start"} <= logger.rows[0][1]


@pytest.mark.parametrize(("every", "steps"), [(50, [6, 10]), (4, [6, 8, 10]), (5, [6, 10])])
def test_a_resumed_fit_logs_its_first_and_its_last_step(tmp_path, every, steps):
    logger = Rows()
    options = QUIET | {"log_every_n_steps": every, "enable_checkpointing": True, "default_root_dir": tmp_path}
    sg.Trainer(max_epochs=1, **options).fit(Net(), loader(20))
    sg.Trainer(max_epochs=2, **(options | {"logger": logger})).fit(Net(), loader(20), ckpt_path="last")

    assert [step for step, names in logger.rows if "train_loss" in names] == steps


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 5}, {"max_steps": 3}], ids=str)
def test_the_last_step_is_logged_before_the_checkpoint_of_the_end_is_saved(limit):
    """So that plugins that keep what was logged, such as the report, find it when a run is resumed."""
    logged = []

    class Watching(Rows):
        @sg.hookimpl
        def on_validation_end(self, trainer):
            logged.append([step for step, names in self.rows if "train_loss" in names])

        on_train_epoch_end = on_validation_end

    options = QUIET | {"logger": Watching(), "num_sanity_val_steps": 0}
    sg.Trainer(**limit, **options).fit(Net(), loader(20), loader(4))

    assert all(steps == [1, limit.get("max_steps", 5)] for steps in logged)
    assert logged


class ReadsAll(sg.Callback):
    """Reads what is for modules and scripts."""

    def __init__(self):
        self.read = {}

    def on_train_batch_end(self, trainer):
        self.read = {name: getattr(trainer, name) for name in vars(UserView) if not name.startswith("_")}
        self.read |= {name: getattr(trainer, name) for name in UserView.__annotations__}


def test_a_callback_reads_what_modules_and_scripts_read():
    reads = ReadsAll()
    sg.Trainer(max_steps=1, callbacks=[reads], **QUIET).fit(Net(), joined_batches(1, 8))

    assert len(reads.read) == 15
    assert (reads.read["training"], reads.read["local_rank"], reads.read["logger"]) == (True, 0, None)
    assert reads.read["estimated_stepping_batches"] == 1
