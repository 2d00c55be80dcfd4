"""Small programs that run under Lightning and under stratagem: each returns what a user sees.

    python tests/repository/lightning_programs.py lightning.pytorch

prints what each of them returned, as JSON. Names of a section of docs/lightning-api.md that a program uses are said
with `shows`: what it returns must then be equal under both.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: The programs by name, and what each shows: (section of the page, name).
PROGRAMS = {}
SHOWN = {}


def shows(section, names):
    """Add a program, which shows `names` of `section`."""

    def add(program):
        PROGRAMS[program.__name__] = program
        SHOWN.setdefault(program.__name__, set()).update((section, name) for name in names.split())
        return program

    return add


def library(name):
    """Return what programs use of the library `name`."""
    sys.modules.setdefault("mpi4py", None)  # where it is installed without MPI, Lightning fails
    package = importlib.import_module(name)
    return SimpleNamespace(
        Trainer=package.Trainer,
        Module=getattr(package, "LightningModule", None) or package.Module,
        DataModule=getattr(package, "LightningDataModule", None) or package.DataModule,
        Callback=package.Callback,
        callbacks=importlib.import_module(f"{name}.callbacks"),
        loggers=importlib.import_module(f"{name}.loggers"),
    )


def loader(batches=4, size=2, **options):
    """Return a loader of `batches` batches of ((size, 4) inputs, (size, 1) targets)."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batches * size, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size, **options)


def trainer(api, folder, **options):
    """Return a trainer that prints nothing and writes nothing, unless `options` say otherwise."""
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
             "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1,
             "default_root_dir": str(folder)}  # fmt: skip
    return api.Trainer(**quiet | options)


def model(api, **methods):
    """Return a linear module on `api`, with `methods` instead of those below."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def init(self):
        api.Module.__init__(self)
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    parts = {
        "__init__": init, "training_step": training_step, "validation_step": validation_step, "test_step": test_step,
        "predict_step": lambda self, batch, batch_idx, dataloader_idx=0: self.layer(batch[0]),
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
    }  # fmt: skip
    return type("Model", (api.Module,), parts | methods)()


def plain(value):
    """Return `value` as JSON has it."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return repr(value) if value in (float("inf"), float("-inf")) or value != value else round(value, 5)
    if isinstance(value, Path):
        return f"Path {value}"
    return value if isinstance(value, str | int | bool | None) else type(value).__name__


def weights(module):
    return [parameter.detach().flatten().tolist() for parameter in module.parameters()]


# --- Arguments of the trainer ----------------------------------------------------------------------------------------

ARGUMENTS = "Arguments of the Trainer"


def seen_by(api, folder, module=None, loaders=None, **options):
    """Return how a fit with `options` ended."""
    module, calls = module or model(api), []

    class Count(api.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            calls.append(["train", trainer.current_epoch, batch_idx])

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            calls.append(["validate", trainer.global_step, batch_idx, trainer.sanity_checking])

    run = trainer(api, folder, **options | {"callbacks": [Count(), *options.get("callbacks", [])]})
    run.fit(module, *(loaders or (loader(), loader(2))))
    whole = run.global_step * run.accumulate_grad_batches % run.num_training_batches == 0
    return {"epoch": run.current_epoch if whole else None, "step": run.global_step, "calls": calls, "weights": weights(module),
            "metrics": run.callback_metrics}  # fmt: skip


@shows(ARGUMENTS, "max_epochs max_steps min_epochs min_steps")
def lengths(api, folder):
    cases = [{"max_epochs": 2}, {"max_epochs": 3, "max_steps": 6}, {"max_epochs": -1, "max_steps": 5}, {"max_steps": 4},
             {"max_epochs": 2, "min_epochs": 1}, {"max_epochs": 2, "min_steps": 3}, {"max_steps": 0}, {"max_epochs": 0}]  # fmt: skip
    return {str(case): seen_by(api, folder, **case) for case in cases}


@shows(ARGUMENTS, "check_val_every_n_epoch num_sanity_val_steps")
def validations(api, folder):
    cases = [{"check_val_every_n_epoch": 2, "max_epochs": 4}, {"num_sanity_val_steps": 1}, {"num_sanity_val_steps": -1},
             {"val_check_interval": 2}, {"val_check_interval": 0.25}, {"val_check_interval": 0.5, "max_epochs": 2},
             {"val_check_interval": 6, "check_val_every_n_epoch": None, "max_epochs": 4},
             {"val_check_interval": 3, "max_steps": 3, "max_epochs": 4},
             {"limit_val_batches": 0, "val_check_interval": 100}]  # fmt: skip
    return {str(case): seen_by(api, folder, **case) for case in cases}


@shows(ARGUMENTS, "limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches")
def limits(api, folder):
    found = {}
    for limit in (1, 2, 0.5, 1.0, 0.7, 0, None):
        module = model(api)
        run = trainer(api, folder, limit_train_batches=limit, limit_val_batches=limit, limit_test_batches=limit,
                      limit_predict_batches=limit)  # fmt: skip
        run.fit(module, loader(), loader(5))
        found[str(limit)] = [run.global_step, run.current_epoch, run.num_val_batches]
        if limit != 0:
            test, predicted = run.test(module, loader(5), verbose=False), run.predict(module, loader(5))
            found[str(limit)] += [
                run.num_training_batches,
                test,
                len(predicted),
                run.num_test_batches,
                run.num_predict_batches,
            ]
    for overfit in (1, 2, 0.5):
        found[f"overfit {overfit}"] = seen_by(api, folder, overfit_batches=overfit, max_epochs=2)
    return found


@shows(
    ARGUMENTS,
    "limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches fast_dev_run",
)
def limits_as_attributes(api, folder):
    names = ["limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"]
    cases = [{}, {"fast_dev_run": True}, {"fast_dev_run": 3}, {"overfit_batches": 0.5}, *({name: 2} for name in names),
             *({name: 0.5} for name in names), *({name: None} for name in names)]  # fmt: skip
    runs = [trainer(api, folder, **case) for case in cases]
    return [[[type(value).__name__, value] for name in names for value in [getattr(run, name)]] for run in runs]


@shows(ARGUMENTS, "fast_dev_run")
def trials(api, folder):
    cases = [{"fast_dev_run": True}, {"fast_dev_run": 3}, {"fast_dev_run": True, "limit_val_batches": 0},
             {"fast_dev_run": 2, "logger": True, "enable_checkpointing": True}]  # fmt: skip
    return {str(case): seen_by(api, folder, **case) for case in cases} | {"files": sorted(os.listdir(folder))}


@shows(ARGUMENTS, "gradient_clip_val gradient_clip_algorithm")
def clipping(api, folder):
    cases = [{"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
             {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4}]  # fmt: skip
    return {str(case): seen_by(api, folder, max_epochs=2, **case) for case in cases}


@shows(ARGUMENTS, "precision strategy accelerator devices num_nodes")
def where(api, folder):
    return {
        "bf16-mixed": seen_by(api, folder, precision="bf16-mixed")["step"],
        "32-true": seen_by(api, folder, precision="32-true", strategy="auto", num_nodes=1),
        "32": seen_by(api, folder, precision=32, accelerator="auto", devices="auto"),
        "64": seen_by(api, folder, precision="64-true")["step"],
    }


@shows(ARGUMENTS, "barebones")
def bare(api, folder):
    run = api.Trainer(barebones=True, accelerator="cpu", max_epochs=1, default_root_dir=str(folder))
    run.fit(model(api), loader(), loader(2))
    return [run.global_step, run.checkpoint_callback, sorted(os.listdir(folder))]


@shows(ARGUMENTS, "callbacks enable_checkpointing default_root_dir")
def files(api, folder):
    found = {}
    for name, options in {
        "checkpoints": {"enable_checkpointing": True, "max_epochs": 2},
        "none": {"enable_checkpointing": False},
    }.items():
        root = folder / name
        run = trainer(api, root, **options)
        run.fit(model(api), loader(), loader(2))
        found[name] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
        found[f"{name} callback"] = type(run.checkpoint_callback).__name__
    return found


@shows(
    ARGUMENTS,
    "detect_anomaly deterministic inference_mode enable_progress_bar profiler sync_batchnorm use_distributed_sampler",
)
def switches(api, folder):
    seen = []
    module = model(api, validation_step=lambda self, batch, batch_idx: seen.append(
        [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_anomaly_enabled()]))  # fmt: skip
    for options in ({"inference_mode": False}, {"inference_mode": True}, {"detect_anomaly": True}, {"deterministic": True},
                    {"sync_batchnorm": True}, {"use_distributed_sampler": False}, {"profiler": "simple"},
                    {"profiler": "advanced"}):  # fmt: skip
        trainer(api, folder, **options).fit(module, loader(), loader(1))
        seen.append(torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(False)
    return seen


@shows(ARGUMENTS, "reload_dataloaders_every_n_epochs")
def reloading(api, folder):
    seen = []

    def train_dataloader(self):
        seen.append(["train", self.trainer.current_epoch])
        return loader()

    def val_dataloader(self):
        seen.append(["val", self.trainer.current_epoch])
        return loader(2)

    for options in ({}, {"reload_dataloaders_every_n_epochs": 1}, {"reload_dataloaders_every_n_epochs": 2},
                    ):  # fmt: skip
        seen.append(str(options))
        module = model(api, train_dataloader=train_dataloader, val_dataloader=val_dataloader)
        trainer(api, folder, max_epochs=4, **options).fit(module)
    return seen


@shows(ARGUMENTS, "max_time")
def times(api, folder):
    found = {}
    for limit in ("00:00:00:00", timedelta(days=1), {"hours": 1}, {"minutes": 0}):
        run = trainer(api, folder, max_time=limit, max_epochs=2)
        run.fit(model(api), loader())
        found[str(limit)] = [run.global_step, run.current_epoch]
    timer = api.callbacks.Timer(duration={"hours": 1})
    run = trainer(api, folder, callbacks=[timer])
    run.fit(model(api), loader())
    found["timer"] = [timer.time_elapsed("train") > 0, timer.time_remaining("train") > 3000]
    return found


@shows(ARGUMENTS, "log_every_n_steps")
def rows_of_loggers(api, folder):
    logger = api.loggers.CSVLogger(str(folder), name="rows")
    run = trainer(api, folder, logger=logger, log_every_n_steps=1, max_epochs=2)
    run.fit(model(api), loader(), loader(2))
    lines = [line.split(",") for line in Path(logger.log_dir, "metrics.csv").read_text().splitlines()]
    columns = dict(zip(lines[0], zip(*lines[1:], strict=True), strict=True))
    return {name: [float(value) for value in columns[name] if value] for name in ("loss", "val_loss")}


# --- Hooks -----------------------------------------------------------------------------------------------------------

MODULE, CALLBACK, DATA, TRAINER = "LightningModule", "Callback", "LightningDataModule", "Trainer"
EVENTS = (
    "on_after_backward on_before_backward on_before_optimizer_step on_before_zero_grad on_fit_end on_fit_start "
    "on_load_checkpoint on_predict_batch_end on_predict_batch_start on_predict_end on_predict_epoch_end "
    "on_predict_epoch_start on_predict_start on_save_checkpoint on_test_batch_end on_test_batch_start on_test_end "
    "on_test_epoch_end on_test_epoch_start on_test_start on_train_batch_end on_train_batch_start on_train_end "
    "on_train_epoch_end on_train_epoch_start on_train_start on_validation_batch_end on_validation_batch_start "
    "on_validation_end on_validation_epoch_end on_validation_epoch_start on_validation_start setup"
)


def short(value):
    """Return what a hook got, in a word."""
    if isinstance(value, torch.Tensor):
        return ["tensor", *value.shape]
    if isinstance(value, dict):
        return ["dict", *sorted(str(key) for key in value if key in {"loss", "epoch", "global_step", "state_dict"})]
    return value if isinstance(value, int | str | None) else {"Model": "module"}.get(type(value).__name__, "value")


def recorder(api, base, where, seen, skip=()):
    """Return methods for a class on `base` that note each call of a hook in `seen`."""

    def method(name):
        original = getattr(base, name)

        def note(self, *args, **options):
            on_module = getattr(api.Module, name, original)
            of_callback = 2 if where == "callback" else 0  # the trainer and the module come first
            names = [key for key in inspect.signature(on_module).parameters if key != "self"]
            given = dict(zip(names, args[of_callback:], strict=False)) | options
            given = {key: short(value) for key, value in given.items()}
            if given.get("dataloader_idx") == 0:
                del given["dataloader_idx"]
            seen.append([where, name, given])
            return original(self, *args, **options)

        return note

    return {name: method(name) for name in dir(base) if name.startswith("on_") and name not in {"on_gpu", *skip}}


def traced(api, folder, calls, **options):
    """Return all calls of hooks of a module and a callback that `calls` leads to."""
    seen = []
    hooks = recorder(api, api.Module, "module", seen)
    hooks["setup"] = lambda self, stage: seen.append(["module", "setup", stage])
    hooks["teardown"] = lambda self, stage: seen.append(["module", "teardown", stage])
    hooks["prepare_data"] = lambda self: seen.append(["module", "prepare_data"])
    hooks["configure_model"] = lambda self: seen.append(["module", "configure_model"])
    own = recorder(api, api.Callback, "callback", seen, skip={"on_exception"})
    own["setup"] = lambda self, trainer, pl_module, stage: seen.append(["callback", "setup", stage])
    callback = type("Mine", (api.Callback,), own)()
    run = trainer(api, folder, callbacks=[callback], **options)
    calls(run, model(api, **hooks))
    return seen


@shows(
    MODULE,
    f"{EVENTS} teardown prepare_data configure_model on_before_batch_transfer on_after_batch_transfer "
    "on_test_model_eval on_test_model_train on_validation_model_eval on_validation_model_train "
    "on_validation_model_zero_grad on_predict_model_eval",
)
@shows(CALLBACK, f"{EVENTS} on_sanity_check_end on_sanity_check_start")
def hooks_of_fit(api, folder):
    def calls(run, module):
        run.fit(module, loader(2), loader(1))
        run.save_checkpoint(folder / "saved.ckpt")

    return traced(api, folder, calls, max_epochs=2, num_sanity_val_steps=1)


@shows(MODULE, "training_step")
def hooks_of_a_second_fit(api, folder):
    def calls(run, module):
        run.fit(module, loader(2), loader(1))
        run.save_checkpoint(folder / "saved.ckpt")
        again = trainer(api, folder, max_epochs=2, callbacks=run.callbacks)
        again.fit(module, loader(2), loader(1), ckpt_path=str(folder / "saved.ckpt"))

    return traced(api, folder, calls)


@shows(MODULE, "training_step")
def hooks_of_evaluation(api, folder):
    def calls(run, module):
        run.validate(module, loader(2), verbose=False)
        run.test(module, loader(2), verbose=False)
        run.predict(module, loader(2))

    return traced(api, folder, calls)


@shows(MODULE, "training_step")
def hooks_of_accumulation(api, folder):
    return traced(api, folder, lambda run, module: run.fit(module, loader(3)), accumulate_grad_batches=2)


@shows(MODULE, "on_fit_start")
def hooks_of_manual_optimization(api, folder):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch[0]).square().mean())
        optimizer.step()

    seen = []
    hooks = recorder(api, api.Module, "module", seen)
    module = model(api, training_step=training_step, automatic_optimization=False, **hooks)
    trainer(api, folder).fit(module, loader(2))
    return seen


@shows(CALLBACK, "on_exception")
@shows(DATA, "on_exception")
def hooks_of_an_error(api, folder):
    seen = []

    class Data(api.DataModule):
        def train_dataloader(self):
            return loader()

        def on_exception(self, exception):
            seen.append(["data", type(exception).__name__])

        def teardown(self, stage):
            seen.append(["data", "teardown", stage])

    class Mine(api.Callback):
        def on_exception(self, trainer, pl_module, exception):
            seen.append(["callback", type(exception).__name__])

    def training_step(self, batch, batch_idx):
        raise ValueError("a mistake")

    try:
        trainer(api, folder, callbacks=[Mine()]).fit(model(api, training_step=training_step), datamodule=Data())
    except ValueError as error:
        seen.append(str(error))
    return seen


@shows(CALLBACK, "state_dict load_state_dict")
@shows(
    DATA,
    "state_dict load_state_dict setup prepare_data train_dataloader val_dataloader test_dataloader predict_dataloader teardown "
    "on_before_batch_transfer on_after_batch_transfer transfer_batch_to_device",
)
@shows(MODULE, "transfer_batch_to_device")
def data_and_states(api, folder):
    seen, loaded = [], []

    class Data(api.DataModule):
        def prepare_data(self):
            seen.append("prepare_data")

        def setup(self, stage):
            seen.append(["setup", stage])

        def teardown(self, stage):
            seen.append(["teardown", stage])

        def train_dataloader(self):
            seen.append("train_dataloader")
            return loader(2)

        def val_dataloader(self):
            seen.append("val_dataloader")
            return [loader(1), loader(1)]

        def test_dataloader(self):
            seen.append("test_dataloader")
            return loader(1)

        def predict_dataloader(self):
            seen.append("predict_dataloader")
            return loader(1)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(["before", dataloader_idx])
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            seen.append(["transfer", str(device), dataloader_idx])
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            seen.append(["after", dataloader_idx])
            return batch

        def state_dict(self):
            seen.append("state_dict")
            return {"at": 7}

        def load_state_dict(self, state_dict):
            seen.append(state_dict)

    class Mine(api.Callback):
        def state_dict(self):
            return {"count": 3}

        def load_state_dict(self, state_dict):
            loaded.append(state_dict)

    module = model(
        api, validation_step=lambda self, batch, batch_idx, dataloader_idx=0: self.log("v", 1.0 + dataloader_idx)
    )
    data = Data()
    run = trainer(api, folder, callbacks=[Mine()])
    run.fit(module, datamodule=data)
    run.save_checkpoint(folder / "saved.ckpt")
    run.test(module, datamodule=data, verbose=False)
    run.predict(module, datamodule=data)
    seen.append(run.validate(module, datamodule=data, verbose=False))
    trainer(api, folder, max_epochs=2, callbacks=[Mine()]).fit(
        module, datamodule=data, ckpt_path=str(folder / "saved.ckpt")
    )
    seen.append([loaded, data.trainer is not None, sorted(run.callback_metrics)])
    return seen


@shows(DATA, "from_datasets")
def from_datasets(api, folder):
    dataset = TensorDataset(torch.arange(10.0))
    data = api.DataModule.from_datasets(dataset, [dataset, dataset], dataset, batch_size=4)
    found = [[len(batch[0]) for batch in data.train_dataloader()], [len(each) for each in data.val_dataloader()],
             [batch[0].tolist() for batch in data.test_dataloader()], type(data.train_dataloader().sampler).__name__]  # fmt: skip

    class Mine(api.DataModule):
        def __init__(self, batch_size=1, other=2):
            super().__init__()
            self.batch_size, self.other = batch_size, other

    mine = Mine.from_datasets(dataset, batch_size=3, other=5)
    return [*found, mine.batch_size, mine.other, len(mine.train_dataloader())]


# --- The module ------------------------------------------------------------------------------------------------------

METHODS = "Arguments of its methods, of `log` and of `load_from_checkpoint`"


@shows(
    MODULE,
    "log_dict current_epoch global_step global_rank local_rank device dtype logger loggers trainer all_gather print "
    "example_input_array strict_loading automatic_optimization lr_schedulers optimizers hparams",
)
def attributes_of_a_module(api, folder):
    seen = {}

    def training_step(self, batch, batch_idx):
        seen[f"{self.current_epoch} {batch_idx}"] = [
            self.global_step, self.global_rank, self.local_rank, str(self.device), str(self.dtype), self.logger is None,
            self.loggers, type(self.trainer).__name__, self.optimizers().param_groups[0]["lr"],
            type(self.lr_schedulers()).__name__, type(self.optimizers(use_pl_optimizer=False)).__name__,
            self.all_gather(torch.ones(2)), self.all_gather({"a": torch.ones(1)}), self.trainer.is_last_batch,
            self.example_input_array, self.strict_loading, self.automatic_optimization, dict(self.hparams),
            self.training, torch.is_grad_enabled(),
        ]  # fmt: skip
        loss = self.layer(batch[0]).square().mean()
        self.log_dict({"a": loss, "b": 2.0 * batch_idx}, on_step=False, on_epoch=True)
        return {"loss": loss, "other": 1}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    module = model(api, training_step=training_step, configure_optimizers=configure_optimizers)
    run = trainer(api, folder, max_epochs=2)
    run.fit(module, loader(2))
    return [seen, run.callback_metrics, str(module.device), module.current_epoch, module.global_step]


@shows(MODULE, "freeze unfreeze toggle_optimizer untoggle_optimizer toggled_optimizer manual_backward clip_gradients")
def two_optimizers(api, folder):
    seen = []

    def init(self):
        api.Module.__init__(self)
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            if batch_idx % 2:
                self.toggle_optimizer(optimizer)
            with contextlib.nullcontext() if batch_idx % 2 else self.toggled_optimizer(optimizer):
                seen.append([parameter.requires_grad for parameter in self.parameters()])
                loss = (self.second(self.first(batch[0])) - batch[1]).square().mean() * (index + 1)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            if batch_idx % 2:
                self.untoggle_optimizer(optimizer)
            self.log(f"loss{index}", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.Adam(self.second.parameters(), 0.01)

    module = model(api, __init__=init, training_step=training_step, configure_optimizers=configure_optimizers)
    run = trainer(api, folder)
    run.fit(module, loader())
    frozen = module.freeze()
    seen.append(
        [type(frozen).__name__, [parameter.requires_grad for parameter in module.parameters()], module.training]
    )
    seen.append(module.unfreeze() is module)
    seen.append([[parameter.requires_grad for parameter in module.parameters()], module.training])
    return [seen, weights(module), run.global_step, run.callback_metrics]


@shows(MODULE, "optimizer_step optimizer_zero_grad backward configure_gradient_clipping lr_scheduler_step")
def own_steps(api, folder):
    seen = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        seen.append(["step", epoch, batch_idx, optimizer.param_groups[0]["lr"]])
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        seen.append(["zero", epoch, batch_idx, type(optimizer).__name__])
        optimizer.zero_grad()

    def backward(self, loss):
        seen.append(["backward", float(loss)])
        loss.backward()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        seen.append(["clip", gradient_clip_val])
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler, metric):
        seen.append(["schedule", type(scheduler).__name__, metric, self.trainer.global_step])
        scheduler.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}}  # fmt: skip

    own = (
        optimizer_step,
        optimizer_zero_grad,
        backward,
        configure_gradient_clipping,
        lr_scheduler_step,
        configure_optimizers,
    )
    module = model(api, **{method.__name__: method for method in own})
    trainer(api, folder, accumulate_grad_batches=2, max_epochs=2).fit(module, loader(8))
    return [seen, weights(module)]


@shows(MODULE, "configure_optimizers")
@shows(TRAINER, "lr_scheduler_configs estimated_stepping_batches optimizers")
def schedulers(api, folder):
    found = {}
    schedule = torch.optim.lr_scheduler

    def plateau(optimizer, **options):
        return {
            "scheduler": schedule.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
            "monitor": "val_loss",
            **options,
        }

    cases = {
        "epoch": lambda self, o: [[o], [schedule.StepLR(o, 1, 0.5)]],
        "step": lambda self, o: [[o], [{"scheduler": schedule.StepLR(o, 1, 0.5), "interval": "step"}]],
        "every other": lambda self, o: [[o], [{"scheduler": schedule.StepLR(o, 1, 0.5), "frequency": 2}]],
        "plateau": lambda self, o: {"optimizer": o, "lr_scheduler": plateau(o)},
        "plateau train": lambda self, o: {"optimizer": o, "lr_scheduler": plateau(o) | {"monitor": "loss"}},
        "not strict": lambda self, o: {"optimizer": o, "lr_scheduler": plateau(o, strict=False) | {"monitor": "nothing"}},
        "two": lambda self, o: [[o], [schedule.StepLR(o, 1, 0.5), {"scheduler": schedule.StepLR(o, 1, 0.9), "name": "mine"}]],
        "one cycle": lambda self, o: [[o], [{
            "scheduler": schedule.OneCycleLR(o, 1.0, total_steps=self.trainer.estimated_stepping_batches),
            "interval": "step"}]],
        "plain dict": lambda self, o: {"optimizer": o, "lr_scheduler": schedule.StepLR(o, 1, 0.5)},
        "none": lambda self, o: o,
    }  # fmt: skip
    for name, case in cases.items():
        rates = []

        def configure_optimizers(self, case=case):
            made = case(self, torch.optim.SGD(self.parameters(), lr=0.1))
            return tuple(made) if isinstance(made, list) else made

        def on_train_batch_start(self, batch, batch_idx, rates=rates):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        module = model(api, configure_optimizers=configure_optimizers, on_train_batch_start=on_train_batch_start)
        run = trainer(api, folder, max_epochs=3)
        run.fit(module, loader(2), loader(1))
        configs = [[each.interval, each.frequency, each.monitor, each.strict, each.name]
                   for each in run.lr_scheduler_configs]  # fmt: skip
        found[name] = [rates, configs, run.optimizers[0].param_groups[0]["lr"], run.estimated_stepping_batches]
    return found


@shows(MODULE, "lr_schedulers")
def schedulers_by_hand(api, folder):
    rates = []

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()
        rates.append([optimizer.param_groups[0]["lr"], type(scheduler).__name__])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    module = model(
        api, training_step=training_step, automatic_optimization=False, configure_optimizers=configure_optimizers
    )
    trainer(api, folder).fit(module, loader(3))

    def on_train_epoch_end(self):
        self.lr_schedulers().step(self.trainer.callback_metrics["loss_epoch"])

    def with_plateau(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=100.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}

    def step_only(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])

    module = model(api, training_step=step_only, automatic_optimization=False, configure_optimizers=with_plateau,
                   on_train_epoch_end=on_train_epoch_end)  # fmt: skip
    trainer(api, folder, max_epochs=4).fit(module, loader(2))
    return rates


@shows(MODULE, "save_hyperparameters hparams")
@shows(DATA, "save_hyperparameters hparams")
@shows(METHODS, "checkpoint_path strict filepath")
def hyperparameters(api, folder):
    class Mine(api.Module):
        def __init__(self, width=3, *, rate=0.1, extra=None):
            super().__init__()
            self.save_hyperparameters(ignore=["extra"])
            self.layer = nn.Linear(4, width)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)

    class Child(Mine):
        def __init__(self, depth=1, **options):
            super().__init__(**options)
            self.save_hyperparameters()

    class Data(api.DataModule):
        def __init__(self, size=2, name="a"):
            super().__init__()
            self.save_hyperparameters("size")

    module = Child(depth=4, width=5, extra="x")
    run = trainer(api, folder)
    run.fit(module, loader())
    run.save_checkpoint(folder / "saved.ckpt")
    again = Child.load_from_checkpoint(folder / "saved.ckpt", depth=7)
    return [dict(module.hparams), module.hparams.width, dict(Data(size=9).hparams), dict(again.hparams), again.layer.weight.shape,
            torch.equal(again.layer.weight, module.layer.weight)]  # fmt: skip


@shows(MODULE, "configure_callbacks on_load_checkpoint on_save_checkpoint")
def callbacks_of_a_module(api, folder):
    class First(api.Callback):
        pass

    class Second(api.Callback):
        pass

    second = Second()
    module = model(api, configure_callbacks=lambda self: [second, First()])
    run = trainer(api, folder, callbacks=[Second(), api.callbacks.Timer()])
    run.fit(module, loader(1))
    return [[type(each).__name__ for each in run.callbacks if type(each).__name__ in ("First", "Second", "Timer")],
            second in run.callbacks]  # fmt: skip


@shows(MODULE, "configure_sharded_model predict_step test_step validation_step training_step")
@shows(METHODS, "model dataloaders datamodule train_dataloaders val_dataloaders verbose return_predictions ckpt_path")
@shows(TRAINER, "fit predict_dataloaders test_dataloaders train_dataloader val_dataloaders")
def calls(api, folder):
    module = model(api, on_fit_start=lambda self: None)
    run = trainer(api, folder, max_epochs=1)
    run.fit(model=module, train_dataloaders=loader(), val_dataloaders=loader(1))
    run.save_checkpoint(filepath=folder / "saved.ckpt", weights_only=False)
    run.save_checkpoint(folder / "weights.ckpt", True)
    found = [run.validate(module, dataloaders=loader(2), verbose=False), run.test(model=module, dataloaders=loader(2), verbose=False),
             run.predict(module, dataloaders=loader(1)), run.predict(module, [loader(1), loader(2)]),
             run.predict(module, loader(1), return_predictions=None)]  # fmt: skip
    fresh = model(api)
    nn.init.zeros_(fresh.layer.weight)
    kinds = []

    class Look(api.Callback):
        def on_train_start(self, trainer, pl_module):
            kinds.extend([type(trainer.train_dataloader).__name__, type(trainer.val_dataloaders).__name__])

        def on_test_start(self, trainer, pl_module):
            kinds.append(type(trainer.test_dataloaders).__name__)

        def on_predict_start(self, trainer, pl_module):
            kinds.append(type(trainer.predict_dataloaders).__name__)

    looking = trainer(api, folder, callbacks=[Look()])
    looking.fit(fresh, loader(1), loader(1))
    looking.test(fresh, loader(1), verbose=False)
    looking.predict(fresh, loader(1))
    found += [run.test(fresh, loader(2), ckpt_path=str(folder / "saved.ckpt"), verbose=False), weights(fresh)]
    for saved in ("saved", "weights"):
        found.append(weights(type(fresh).load_from_checkpoint(folder / f"{saved}.ckpt", strict=True)))
    more = trainer(api, folder, max_epochs=3)
    more.fit(fresh, loader(), ckpt_path=str(folder / "saved.ckpt"), weights_only=None)
    return [*found, kinds, more.global_step, more.current_epoch, weights(fresh)]


@shows(METHODS, "value name checkpoint_path strict filepath datamodule model")
@shows(MODULE, "configure_sharded_model print")
@shows(TRAINER, "print")
def calls_by_name(api, folder):
    class Data(api.DataModule):
        def train_dataloader(self):
            return loader(2)

        def val_dataloader(self):
            return loader(1)

    def init(self):
        api.Module.__init__(self)
        self.layer, self.made = nn.Linear(4, 1), 0
        nn.init.ones_(self.layer.weight)

    def configure_sharded_model(self):
        self.made += 1

    def training_step(self, batch, batch_idx):
        self.log(name="mine", value=2.0)
        self.print("of the module", batch_idx)
        self.trainer.print("of the trainer", batch_idx)
        return self.layer(batch[0]).square().mean()

    printed = io.StringIO()
    module = model(api, __init__=init, training_step=training_step, configure_sharded_model=configure_sharded_model)
    run = trainer(api, folder)
    with contextlib.redirect_stdout(printed):
        run.fit(model=module, datamodule=Data())
    run.save_checkpoint(filepath=folder / "saved.ckpt")
    again = type(module).load_from_checkpoint(checkpoint_path=folder / "saved.ckpt", strict=False)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("of the")]
    return [
        lines,
        module.made,
        weights(again),
        run.callback_metrics,
        run.validate(model=module, datamodule=Data(), verbose=False),
    ]


# --- log -------------------------------------------------------------------------------------------------------------


def logged(api, folder, step, batches=3, **more):
    """Return what `callback_metrics`, `logged_metrics` and `progress_bar_metrics` hold after a fit and a validation."""
    options = more.pop("options", {})
    module = model(api, training_step=step, **more)
    run = trainer(api, folder, **options)
    run.fit(module, loader(batches), loader(2))
    return [run.callback_metrics, run.logged_metrics, run.progress_bar_metrics]


@shows(METHODS, "name value on_step on_epoch prog_bar logger reduce_fx batch_size sync_dist rank_zero_only")
@shows(TRAINER, "callback_metrics logged_metrics progress_bar_metrics")
def values_logged(api, folder):
    found = {}
    cases = [
        {}, {"on_epoch": True}, {"on_step": False, "on_epoch": True}, {"on_step": False, "on_epoch": True, "prog_bar": True},
        {"logger": False}, {"reduce_fx": "max", "on_epoch": True}, {"reduce_fx": "sum", "on_epoch": True},
        {"reduce_fx": "MIN", "on_epoch": True, "on_step": False}, {"reduce_fx": "avg", "on_epoch": True},
        {"reduce_fx": torch.mean, "on_epoch": True}, {"reduce_fx": torch.max, "on_epoch": True},
        {"batch_size": 3, "on_epoch": True}, {"sync_dist": True, "on_epoch": True}, {"rank_zero_only": True},
        {"on_step": False, "on_epoch": True, "batch_size": 1},
    ]  # fmt: skip
    for case in cases:

        def training_step(self, batch, batch_idx, case=case):
            self.log("a", float(batch_idx + 1), **case)
            self.log("b", torch.tensor([2.0 * batch_idx]), **case)
            self.log("c", batch_idx, **case)
            return self.layer(batch[0]).square().mean()

        found[str({name: getattr(value, "__name__", value) for name, value in case.items()})] = logged(
            api, folder, training_step
        )
    return found


def kinds(values):
    """Return the kind of each of `values`, which are metrics."""
    return {name: [type(value).__name__, str(getattr(value, "dtype", "")), list(getattr(value, "shape", []))]
            for name, value in values.items()}  # fmt: skip


@shows(TRAINER, "callback_metrics logged_metrics progress_bar_metrics test validate")
@shows("Options of ModelCheckpoint", "monitor")
@shows("Options of EarlyStopping", "monitor")
def kinds_of_metrics(api, folder):
    values = {"number": 0.1, "whole": 3, "truth": True, "tensor": torch.tensor(0.1), "count": torch.tensor(3),
              "half": torch.tensor(0.5, dtype=torch.bfloat16), "one": torch.tensor([0.1])}  # fmt: skip
    seen = []

    def training_step(self, batch, batch_idx):
        for name, value in values.items():
            self.log(f"{name}_on_step", value, prog_bar=True)
            self.log(f"{name}_on_epoch", value, on_step=False, on_epoch=True)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log_dict(values)

    def lr_scheduler_step(self, scheduler, metric):
        seen.append([kinds({"metric": metric}), metric.item()])
        scheduler.step(metric)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "number"}}

    class Look(api.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            bar = {name: value for name, value in trainer.progress_bar_metrics.items() if name.endswith("_on_step")}
            seen.extend([kinds(trainer.callback_metrics), kinds(bar)])

        def on_validation_end(self, trainer, pl_module):
            seen.append(kinds(trainer.callback_metrics))

    checkpoint = api.callbacks.ModelCheckpoint(dirpath=str(folder), monitor="number")
    stopping = api.callbacks.EarlyStopping(monitor="number")
    methods = {"training_step": training_step, "validation_step": validation_step, "test_step": validation_step,
               "lr_scheduler_step": lr_scheduler_step, "configure_optimizers": configure_optimizers}  # fmt: skip
    module = model(api, **methods)
    logger = api.loggers.CSVLogger(str(folder), name="rows")
    run = trainer(api, folder, callbacks=[Look(), checkpoint, stopping], logger=logger, log_every_n_steps=1,
                  enable_checkpointing=True)  # fmt: skip
    run.fit(module, loader(2), loader(1))
    seen += [kinds(run.callback_metrics), kinds(run.logged_metrics), run.callback_metrics["number"].item()]
    scores = {"best": checkpoint.best_model_score, "current": checkpoint.current_score, "kth": checkpoint.kth_value,
              "stopping": stopping.best_score, **dict(enumerate(checkpoint.best_k_models.values()))}  # fmt: skip
    run.callback_metrics["of mine"] = torch.tensor(1.0)
    return [seen, kinds(scores), kinds(run.callback_metrics), kinds(run.validate(module, loader(1), verbose=False)[0]),
            kinds(run.test(module, loader(1), verbose=False)[0]), kinds(run.callback_metrics)]  # fmt: skip


@shows(METHODS, "name value")
def values_logged_by_position(api, folder):
    def training_step(self, batch, batch_idx):
        self.log("a", 1.0 + batch_idx, True, False, False, True, "sum")
        self.log_dict({"b": 2.0 * batch_idx}, True, True, False, True)
        return self.layer(batch[0]).square().mean()

    return logged(api, folder, training_step)


@shows(METHODS, "name value")
def values_logged_in_hooks(api, folder):
    def training_step(self, batch, batch_idx):
        self.log("in_step", 1.0 * batch_idx)
        return self.layer(batch[0]).square().mean()

    hooks = {}
    for name in ("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
                 "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end",
                 "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start",
                 "on_validation_batch_end", "on_validation_epoch_end"):  # fmt: skip
        hooks[name] = lambda self, *args, name=name, **options: self.log(name, 1.0 + self.global_step)
    return logged(api, folder, training_step, **hooks, options={"max_epochs": 2})


@shows(METHODS, "name value")
def values_logged_by_callbacks(api, folder):
    class Mine(api.Callback):
        def on_train_start(self, trainer, pl_module):
            self.log("started", 1.0)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.log("by_callback", 1.0 * batch_idx, on_step=True, on_epoch=True)
            self.log_dict({"p": 2.0, "q": 3.0})

        def on_validation_epoch_end(self, trainer, pl_module):
            self.log("validated", 4.0)

    return logged(
        api,
        folder,
        lambda self, batch, batch_idx: self.layer(batch[0]).square().mean(),
        options={"callbacks": [Mine()]},
    )


@shows(METHODS, "add_dataloader_idx")
def values_of_several_loaders(api, folder):
    found = []
    for options in ({}, {"on_step": True, "on_epoch": True}):

        def validation_step(self, batch, batch_idx, dataloader_idx=0, options=options):
            self.log("v", 1.0 * batch_idx + 10 * dataloader_idx, **options)
            self.log(f"own_{dataloader_idx}", 2.0, add_dataloader_idx=False)

        module = model(api, validation_step=validation_step, test_step=validation_step)
        run = trainer(api, folder)
        run.fit(module, loader(2), [loader(2), loader(3)])
        found.append(run.logged_metrics)
        if not options:
            found += [run.callback_metrics, run.validate(module, [loader(2), loader(1)], verbose=False),
                      run.test(module, loader(3), verbose=False), run.callback_metrics]  # fmt: skip
    return found


@shows(METHODS, "name value")
def steps_of_validation_logged(api, folder):
    def validation_step(self, batch, batch_idx):
        self.log("v", 1.0 * batch_idx, on_step=True, on_epoch=True)

    logger = api.loggers.CSVLogger(str(folder), name="rows")
    run = trainer(api, folder, logger=logger)
    run.fit(model(api, validation_step=validation_step), loader(2), loader(2))
    return run.logged_metrics


@shows(METHODS, "name value")
def torchmetrics_logged(api, folder):
    import torchmetrics

    def init(self):
        api.Module.__init__(self)
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)
        self.metric = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        out = self.layer(batch[0])
        self.metric(out, batch[1])
        self.log("mse", self.metric, on_step=True, on_epoch=True)
        return (out - batch[1]).square().mean()

    return logged(api, folder, training_step, __init__=init, options={"max_epochs": 2})


# --- The trainer -----------------------------------------------------------------------------------------------------


@shows(
    TRAINER,
    "accelerator checkpoint_callback checkpoint_callbacks default_root_dir device_ids early_stopping_callback "
    "early_stopping_callbacks evaluating global_rank interrupted is_global_zero lightning_module local_rank log_dir logger "
    "loggers max_epochs max_steps min_epochs min_steps model node_rank num_devices num_nodes num_predict_batches "
    "num_sanity_val_batches num_test_batches num_training_batches num_val_batches predicting sanity_checking strategy testing "
    "training validating world_size current_epoch global_step is_last_batch",
)
def attributes_of_a_trainer(api, folder):
    names = ["current_epoch", "default_root_dir", "device_ids", "evaluating", "global_rank", "global_step", "interrupted", "is_global_zero", "local_rank", "max_epochs", "max_steps", "min_steps", "node_rank", "num_devices", "num_nodes", "num_sanity_val_batches", "num_val_batches", "predicting", "sanity_checking", "testing", "training", "validating", "world_size"]  # fmt: skip
    seen = {}

    def look(run):
        found = {name: getattr(run, name) for name in names} | {"min_epochs": run.min_epochs or 0}
        found |= {"log_dir": run.log_dir, "module": type(run.lightning_module).__name__, "model": type(run.model).__name__,
                  "checkpoints": [type(each).__name__ for each in run.checkpoint_callbacks], "loggers": len(run.loggers),
                  "stopping": [type(each).__name__ for each in run.early_stopping_callbacks],
                  "first": [type(run.checkpoint_callback).__name__, type(run.early_stopping_callback).__name__]}  # fmt: skip
        return json.loads(json.dumps(plain(found)).replace(str(folder), "FOLDER"))

    class Look(api.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen[f"train {trainer.current_epoch} {batch_idx}"] = look(trainer)
            seen[f"batch {batch_idx}"] = [trainer.is_last_batch, trainer.num_training_batches]

        def on_validation_epoch_end(self, trainer, pl_module):
            seen[f"validation {trainer.current_epoch} {trainer.sanity_checking} {trainer.validating}"] = look(trainer)

        def on_test_epoch_end(self, trainer, pl_module):
            seen["test"] = look(trainer)

        def on_predict_epoch_end(self, trainer, pl_module):
            seen["predict"] = look(trainer)

    checkpoint = api.callbacks.ModelCheckpoint(dirpath=str(folder / "c"), monitor="val_loss")
    stop = api.callbacks.EarlyStopping("val_loss")
    run = trainer(
        api,
        folder,
        callbacks=[Look(), checkpoint, stop],
        max_epochs=2,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
    )
    seen["before"] = {
        name: getattr(run, name)
        for name in (
            "max_epochs",
            "max_steps",
            "min_steps",
            "current_epoch",
            "global_step",
            "num_devices",
            "num_nodes",
            "world_size",
            "log_dir",
            "training",
            "default_root_dir",
        )
    }
    seen["before"]["default_root_dir"] = seen["before"]["default_root_dir"].replace(str(folder), "FOLDER")
    seen["before"]["log_dir"] = seen["before"]["log_dir"].replace(str(folder), "FOLDER")
    run.fit(model(api), loader(2), loader(1))
    seen["after"] = look(run)
    run.test(run.lightning_module, loader(3), verbose=False)
    run.predict(run.lightning_module, loader(3))
    return [seen, run.num_test_batches, run.num_predict_batches]


@shows(TRAINER, "init_module print ckpt_path")
def little_of_a_trainer(api, folder):
    run = trainer(api, folder)
    with run.init_module():
        made = model(api)
    run.fit(made, loader(2))
    run.save_checkpoint(folder / "saved.ckpt")
    again = trainer(api, folder, max_epochs=2)
    seen = []
    made.on_train_start = lambda: seen.append(again.ckpt_path)
    again.fit(made, loader(2), ckpt_path=str(folder / "saved.ckpt"))
    seen.append(again.ckpt_path)
    return json.loads(json.dumps(plain([seen, run.ckpt_path])).replace(str(folder), "FOLDER"))


@shows(ARGUMENTS, "callbacks")
@shows(TRAINER, "callback_metrics")
def callbacks_of_the_library(api, folder):
    seen = []
    monitor = api.callbacks.LearningRateMonitor(logging_interval="step")
    accumulate = api.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    ends = api.callbacks.LambdaCallback(
        on_fit_end=lambda trainer, pl_module: seen.append(["end", trainer.global_step]),
        on_train_epoch_end=lambda trainer, pl_module: seen.append(["epoch end", trainer.current_epoch]),
    )

    def configure_optimizers(self):
        groups = [
            {"params": [self.layer.weight], "name": "weight"},
            {"params": [self.layer.bias], "lr": 0.2, "name": "bias"},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "name": "mine", "interval": "step"}
        ]

    logger = api.loggers.CSVLogger(str(folder), name="rates")
    run = trainer(api, folder, callbacks=[monitor, accumulate, ends], logger=logger, log_every_n_steps=1, max_epochs=3)
    run.fit(model(api, configure_optimizers=configure_optimizers), loader(4))
    return [seen, sorted(name for name in run.logged_metrics), run.global_step, sorted(monitor.lrs)]


@shows(
    "Options of EarlyStopping",
    "check_finite check_on_train_epoch_end divergence_threshold min_delta mode monitor patience "
    "stopping_threshold strict verbose",
)
def early_stopping(api, folder):
    found = {}
    values = [5.0, 4.0, 3.9, 4.1, 3.8, 6.0, float("nan"), 1.0]
    cases = [{}, {"patience": 1}, {"min_delta": 0.5}, {"mode": "max"}, {"stopping_threshold": 3.95}, {"divergence_threshold": 5.5},
             {"check_finite": False, "patience": 10}, {"patience": 10}, {"check_on_train_epoch_end": True, "patience": 1},
             {"monitor": "nothing"}, {"monitor": "nothing", "strict": False}, {"patience": 0}]  # fmt: skip
    for case in cases:
        module = model(api, validation_step=lambda self, batch, batch_idx: self.log("v", values[self.current_epoch]))
        stopping = api.callbacks.EarlyStopping(**{"monitor": "v", "verbose": False} | case)
        run = trainer(api, folder, callbacks=[stopping], max_epochs=8)
        try:
            run.fit(module, loader(1), loader(1))
            ended = None
        except Exception as error:
            ended = "refused" if "nothing" in str(error) else str(error)
        found[str(case)] = [run.current_epoch, stopping.stopped_epoch, stopping.wait_count,
                            *([] if ended or "nothing" in str(case) else [stopping.best_score]), ended]  # fmt: skip
    return found


@shows(
    "Options of ModelCheckpoint",
    "auto_insert_metric_name dirpath enable_version_counter every_n_epochs every_n_train_steps filename "
    "mode monitor save_last save_on_exception save_on_train_epoch_end save_top_k save_weights_only train_time_interval verbose",
)
@shows("ModelCheckpoint", "every_n_epochs")
def model_checkpoint(api, folder):
    found = {}
    values = [5.0, 4.0, 4.5, 3.0]
    cases = [{}, {"save_top_k": 2, "monitor": "v"}, {"save_top_k": -1}, {"save_top_k": 0}, {"save_last": True}, {"save_last": "link"},
             {"every_n_epochs": 2, "save_top_k": -1}, {"every_n_train_steps": 3, "save_top_k": -1}, {"monitor": "v", "mode": "max"},
             {"filename": "{epoch}-{v:.2f}", "monitor": "v"}, {"filename": "a={v:.1f}", "monitor": "v", "auto_insert_metric_name": False},
             {"filename": "fixed", "save_top_k": -1}, {"filename": "fixed", "enable_version_counter": False},
             {"save_weights_only": True}, {"save_on_train_epoch_end": True, "monitor": "v"},
             {"train_time_interval": timedelta(seconds=0), "save_top_k": -1}, {"filename": "{epoch:02d}-{step:04d}"},
             {"every_n_train_steps": 4, "save_last": True, "monitor": "v"}, {"monitor": "v", "save_top_k": 1, "save_last": True},
             {"filename": "sub/{epoch}"}, {"every_n_epochs": 10, "save_last": True}, {"monitor": "loss", "every_n_train_steps": 2},
             {"filename": "{epoch}-{v:.1f}-x", "monitor": "val/x"}]  # fmt: skip

    def validation_step(self, batch, batch_idx):
        self.log("v", values[self.current_epoch])
        self.log("val/x", values[self.current_epoch])

    for number, case in enumerate(cases):
        place = folder / str(number)
        checkpoint = api.callbacks.ModelCheckpoint(**{"dirpath": str(place), "verbose": False} | case)
        run = trainer(api, folder, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=4)
        try:
            run.fit(model(api, validation_step=validation_step), loader(2), loader(1))
        except Exception as error:
            found[str(case)] = f"{type(error).__name__} {error}"
            continue
        files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.suffix == ".ckpt")
        found[str(case)] = json.loads(json.dumps(plain([
            files, checkpoint.best_model_path, checkpoint.last_model_path, checkpoint.best_model_score,
        ])).replace(str(folder), "FOLDER"))  # fmt: skip
    return found


@shows("Options of ModelCheckpoint", "save_on_exception")
def checkpoint_of_an_error(api, folder):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            raise ValueError("a mistake")
        return self.layer(batch[0]).square().mean()

    found = []
    for options in ({}, {"save_on_exception": True}):
        place = folder / str(options)
        checkpoint = api.callbacks.ModelCheckpoint(dirpath=str(place), **options)
        run = trainer(api, folder, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=3)
        with contextlib.suppress(ValueError):
            run.fit(model(api, training_step=training_step), loader(2))
        found.append(len(list(place.rglob("*.ckpt"))))
    return found


@shows("Logger", "log_hyperparams log_metrics")
@shows("CSVLogger", "experiment")
@shows("TensorBoardLogger", "experiment")
@shows(ARGUMENTS, "callbacks")
def loggers(api, folder):
    logger = api.loggers.CSVLogger(str(folder), name="mine", version="one")
    board = api.loggers.TensorBoardLogger(str(folder), name="board")

    def training_step(self, batch, batch_idx):
        self.logger.log_hyperparams({"a": 1})
        self.logger.log_metrics({"m": 1.5}, step=3)
        return self.layer(batch[0]).square().mean()

    run = trainer(api, folder, logger=[logger, board], log_every_n_steps=1)
    run.fit(model(api, training_step=training_step), loader(2))
    board.experiment.add_scalar("x", 1.0, 1)
    return [sorted(os.listdir(folder / "mine")), sorted(os.listdir(folder / "board")), logger.name, logger.version, board.name,
            type(board.experiment).__name__, run.log_dir.replace(str(folder), "FOLDER")]  # fmt: skip


@shows(MODULE, "print")
def helpers(api, folder):
    theirs = api.Trainer.__module__.startswith("lightning")
    utilities = importlib.import_module("lightning.pytorch.utilities" if theirs else "stratagem")
    assert utilities.rank_zero_only(lambda: 3)() == 3
    utilities.rank_zero_info("told")
    utilities.rank_zero_warn("warned")
    return True


def main():
    """Print what each program of those named, or of all, returned."""
    api = library(sys.argv[1])
    found = {}
    for name in sys.argv[2:] or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            os.chdir(folder)
            try:
                found[name] = plain(PROGRAMS[name](api, Path(folder)))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            os.chdir("/")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
