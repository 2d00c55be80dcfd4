"""A method of Lightning's that a class derived from an installed plugin overrides is called, or refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import stratagem as sg
from stratagem import accelerators, callbacks, environments, loggers, precisions, strategies
from stratagem.discovery import catalog
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, PluginError
from stratagem.stack.plugins import Choice
from stratagem_migrate import examine
from stratagem_migrate.source import Source
from stratagem_trainer.api.events import EVENTS, arguments_of
from stratagem_trainer.moved_methods import moved_methods, prepare_methods

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1}
#: An installed plugin of each kind with a table of methods that nobody calls "below" it.
BELOW = {
    "Strategy": strategies.DDPStrategy, "Environment": environments.LocalEnvironment,
    "Accelerator": accelerators.CPUAccelerator,
}  # fmt: skip
#: Methods that are there, but do not decide anything.
READ_ONLY = {
    ("CSVLogger", "log_dir"), ("CSVLogger", "experiment"), ("CSVLogger", "save"), ("TensorBoardLogger", "log_dir"),
    ("TensorBoardLogger", "experiment"), ("BackboneFinetuning", "freeze"), ("BackboneFinetuning", "flatten_modules"),
    ("BackboneFinetuning", "filter_params"), ("BackboneFinetuning", "make_trainable"),
    ("BackboneFinetuning", "unfreeze_and_add_param_group"),
}  # fmt: skip
TABLES = {name: table for name, table in catalog._moved_names().items() if name.startswith("methods ")}


class Net(sg.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.layer = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(self.backbone(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


def fit(**arguments):
    trainer = sg.Trainer(**QUIET | {"logger": False} | arguments)
    trainer.fit(Net(), [torch.ones(2, 1)] * 2)
    return trainer


def installed(table):
    """Return the class that a table is about."""
    _, relation, name = table.split()
    if relation == "below":
        return BELOW[name]
    where = next((each for each in (sg, callbacks, loggers) if hasattr(each, name)), None)
    return getattr(where, name)


def refuse(cls, kind="callback"):
    plugin = object.__new__(cls)
    prepare_methods([Choice(kind=kind, name=cls.__name__, plugin=plugin, reason="")])


@pytest.mark.parametrize("table", TABLES)
def test_each_listed_method_of_a_derived_class_is_refused_and_none_of_the_class_itself(table):
    base = installed(table)
    refuse(base)
    for name in TABLES[table]:
        assert not hasattr(base, name) or (base.__name__, name) in READ_ONLY
        for own in (lambda self: None, property(lambda self: None), staticmethod(lambda: None)):
            with pytest.raises(ConfigError, match=f"defines {name}, which is never called; expected .+"):
                refuse(type("Derived", (base,), {name: own}))
        if (base.__name__, name) in READ_ONLY:
            continue  # the base hides that of a mixin
        with pytest.raises(ConfigError, match=f"defines {name}, which is never called"):
            refuse(type("Mixed", (base, type("Mixin", (), {name: lambda self: None})), {}))


@pytest.mark.parametrize(
    ("base", "name", "argument"),
    [
        (callbacks.ModelCheckpoint, "format_checkpoint_name", "callbacks"),
        (callbacks.TQDMProgressBar, "init_train_tqdm", "callbacks"), (loggers.CSVLogger, "finalize", "logger"),
        (loggers.CSVLogger, "save", "logger"), (loggers.TensorBoardLogger, "experiment", "logger"),
        (sg.Logger, "after_save_checkpoint", "logger"), (strategies.DDPStrategy, "configure_ddp", "strategy"),
        (precisions.MixedPrecision, "convert_input", "precision"),
        (environments.LocalEnvironment, "world_size", "environment"),
    ],
)  # fmt: skip
def test_a_trainer_refuses_it_before_anything_runs(base, name, argument):
    plugin = type("Derived", (base,), {name: lambda self, *_: None})()
    with pytest.raises(ConfigError, match=f"'Derived' defines {name}, which is never called"):
        sg.Trainer(**QUIET, **{argument: [plugin] if argument == "callbacks" else plugin})


def test_a_method_set_on_an_instance_and_on_a_callback_that_a_module_adds_is_refused():
    class Slow(callbacks.Timer):
        pass

    timer = Slow()
    timer.end_time = lambda: 0.0
    with pytest.raises(ConfigError, match="defines end_time, which is never called"):
        sg.Trainer(**QUIET, callbacks=[timer])

    class Adds(Net):
        def configure_callbacks(self):
            return [timer]

    with pytest.raises(ConfigError, match="defines end_time, which is never called"):
        sg.Trainer(**QUIET, logger=False).fit(Adds(), [torch.ones(2, 1)])


def test_names_that_mean_nothing_to_the_class_are_free():
    """A method that an installed class has, an option, and a helper of a class that derives from the kind alone."""

    class Mine(sg.Callback):
        def get_metrics(self):
            return {}

        format_checkpoint_name = file_exists = get_metrics

    class Mean(callbacks.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return True

    class Plain(sg.Strategy):
        def reduce(self):
            pass

    for cls in (Mine, Mean, Plain):
        refuse(cls)
    assert "finalize" in moved_methods(sg.Logger)
    assert "reduce" not in moved_methods(sg.Strategy)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (loggers.CSVLogger, "version"), (loggers.TensorBoardLogger, "log_graph"),
        (callbacks.ModelCheckpoint, "every_n_epochs"), (callbacks.EMA, "decay"),
    ],
)  # fmt: skip
def test_a_method_or_a_property_in_place_of_an_option_is_refused_where_the_class_is_made(base, name):
    for own in (lambda self: None, property(lambda self: None)):
        with pytest.raises(
            PluginError, match=f"Derived defines {name}, an option of what it derives from; .*{name}= to"
        ):
            type("Derived", (base,), {name: own})

    kept = {}
    own = property(lambda self: kept[name], lambda self, value: kept.update({name: value}))
    assert getattr(type("Derived", (base,), {name: own})(), name) == kept[name]


# --- Methods that are set on a class after it was made ---------------------------------------------------------------


def test_methods_that_are_set_on_a_class_later_are_called():
    seen = []

    class Added(sg.Callback):
        pass

    class Replaced(sg.Callback):
        def on_train_end(self, trainer, pl_module):
            seen.append("old")

    class Derived(Replaced):
        pass

    class Log(sg.Logger):
        def log_metrics(self, metrics, step):
            seen.append("old")

    trainer = sg.Trainer(**QUIET, callbacks=[Added()], logger=False)
    Added.on_train_end = lambda self, trainer, pl_module: seen.append("added")
    trainer.fit(Net(), [torch.ones(2, 1)] * 2)
    assert seen.pop() == "added"
    Replaced.on_train_end = lambda self, trainer, pl_module: seen.append(f"replaced {type(self).__name__}")
    Log.log_hyperparams = lambda self, params: seen.append(f"params {params}")
    Log.log_metrics = lambda self, metrics, step=None: seen.append(f"metrics {metrics} {step}")
    log = Log()
    trainer = fit(callbacks=[Added(), Replaced(), Derived()], logger=log)
    trainer.logger.log_metrics({"x": 1.0})

    assert seen == ["added", "replaced Replaced", "replaced Derived", "metrics {'x': 1.0} 2"]


@pytest.mark.parametrize("method", [property(lambda self: None), 3, Mock()], ids=["property", "number", "mock"])
def test_an_attribute_that_is_not_a_method_is_refused_when_it_is_set_later(method):
    class Added(sg.Callback):
        pass

    Added.on_train_end = method
    with pytest.raises(PluginError, match="Added.on_train_end is a .*; expected a method"):
        sg.Trainer(**QUIET, callbacks=[Added()])


# --- Methods that are called ------------------------------------------------------------------------------------------


def test_methods_of_the_bases_are_called_in_what_derives_from_installed_callbacks(capsys):
    seen = []

    class Finetuning(callbacks.BackboneFinetuning):
        def freeze_before_training(self, pl_module):
            seen.append("freeze")
            super().freeze_before_training(pl_module)

        def finetune_function(self, pl_module, current_epoch, optimizer):
            seen.append(current_epoch)
            super().finetune_function(pl_module, current_epoch, optimizer)

    class Bar(callbacks.ProgressBar):
        def get_metrics(self, trainer, pl_module):
            items = super().get_metrics(trainer, pl_module)
            items.pop("loss", None)
            return items | {"note": "short", "twice": 2.0}

    trainer = fit(callbacks=[Finetuning(unfreeze_backbone_at_epoch=1), Bar()], enable_progress_bar=True, max_epochs=2)
    assert isinstance(trainer.callbacks[0], callbacks.BaseFinetuning)
    assert seen == ["freeze", 0, 1]
    assert len(trainer.optimizers[0].param_groups) == 2
    shown = capsys.readouterr().out
    assert "twice 2" in shown
    assert "note short" in shown
    assert "loss" not in shown


def test_a_method_that_overrides_one_that_is_called_last_is_called_last(tmp_path):
    """A checkpoint has what other callbacks did at the end of the epoch, those that are listed after it, too."""

    class Saves(callbacks.ModelCheckpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer)

    class Counts(sg.Callback):
        ended = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.ended += 1

        def state_dict(self):
            return {"ended": self.ended}

    saves = Saves(dirpath=tmp_path)
    fit(callbacks=[saves, Counts(), callbacks.EarlyStopping("x", strict=False)], enable_checkpointing=True)
    states = torch.load(saves.best_model_path)["callbacks"]
    assert {"ended": 1} in states.values()


def signatures():
    """Return the arguments of each event of an installed callback, as it takes them."""
    found = {(event, tuple(arguments_of(event))) for event in ("setup", *EVENTS)}
    for cls in (each for each in map(callbacks.__getattr__, dir(callbacks)) if issubclass(each, sg.Callback)):
        for event, _ in found.copy():
            if hasattr(method := getattr(cls, event), "stratagem_impl"):
                found.add((event, tuple(inspect.signature(method).parameters)[1:]))
    return sorted(found)


def deriving(base, *events):
    """Return a class that derives from `base` and calls the methods of its `events` as Lightning's callbacks do."""

    def method(event):
        return lambda self, *values: getattr(super(own, self), event)(*values)

    return (own := type(f"Own{base.__name__}", (base,), {event: method(event) for event in events}))


def test_an_event_may_be_called_with_all_arguments_in_the_order_of_lightning():
    for event, own in signatures():
        got = []
        record = eval(f"lambda {', '.join(('self', *own))}: got.append([{', '.join(own)}])", {"got": got})
        base = type("Base", (sg.Callback,), {event: sg.hookimpl(record)})
        given = {name: f"the {name}" for name in arguments_of(event)}
        given |= {"trainer": SimpleNamespace(run=given.pop("run"))} | ({"dataloader_idx": 0} if len(given) > 5 else {})

        derived = deriving(base, event)()
        for values in (tuple(given.values()), tuple(given.values())[:5]):
            getattr(derived, event)(*values)
            assert got.pop() == [given.get(name, "the run") for name in own], (event, own)


def test_what_derives_from_an_installed_callback_may_call_its_events(tmp_path):
    seen = []

    class Twice(deriving(callbacks.Timer, "on_train_batch_end")):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            seen.append(self.time_elapsed())

    made = [
        deriving(callbacks.EarlyStopping, "setup", "on_validation_end", "on_train_epoch_end")("x", strict=False),
        deriving(callbacks.ModelCheckpoint, "on_train_batch_end", "on_train_epoch_end", "on_save_checkpoint")(tmp_path),
        deriving(callbacks.LearningRateMonitor, "on_train_start", "on_train_batch_start", "on_train_end")(),
        deriving(callbacks.EMA, "on_train_batch_end", "on_train_end", "on_validation_start")(), Twice(),
        deriving(callbacks.ProgressBar, "on_train_batch_end", "on_train_epoch_end")(),
    ]  # fmt: skip
    trainer = fit(
        callbacks=made, logger=[loggers.CSVLogger(tmp_path)], enable_checkpointing=True, enable_progress_bar=True
    )
    assert len(seen) == 2
    assert torch.load(trainer.checkpoint_callback.best_model_path)["loop"]


# --- migrate ----------------------------------------------------------------------------------------------------------


def test_migrate_tells_of_the_same_methods():
    script = (
        "from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar\n"
        "from lightning.pytorch.loggers import CSVLogger\n"
        "class Names(ModelCheckpoint):\n    def format_checkpoint_name(self, metrics):\n        pass\n"
        "class Bar(RichProgressBar):\n    def configure_columns(self, trainer):\n        pass\n"
        "class Log(CSVLogger):\n    def finalize(self, status):\n        pass\n"
    )
    found = {finding.old: finding.new for finding in examine(Source(Path("a.py"), script.encode()))}

    for old, cls in (
        ("format_checkpoint_name", "ModelCheckpoint"), ("configure_columns", "ProgressBar"), ("finalize", "Logger"),
    ):  # fmt: skip
        assert found[f"def {old}"].endswith(moved_names(f"methods of {cls}")[old].partition("; ")[0])
