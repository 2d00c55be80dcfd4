"""What is logged lands where it should, whatever calls `log`, or is refused."""

from __future__ import annotations

import csv
import inspect

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.stack.plugins import hook_functions, hook_specifications
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data
from stratagem_trainer.api.events import EVENTS

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def loader(count=32, batch_size=8):
    return DataLoader(TensorDataset(*data(count)), batch_size)


class Kept(sg.Logger):
    """Keeps what loggers get."""

    def __init__(self):
        self.rows = []

    @sg.hookimpl
    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics))

    def of(self, name):
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


# --- Several loaders ------------------------------------------------------------------------------------------------


class Evaluated(Net):
    def _evaluate(self, batch_idx, dataloader_idx):
        number = 10.0 * dataloader_idx + batch_idx
        self.log("both", number, on_step=True, on_epoch=True)
        self.log("each", number, on_step=True, on_epoch=False)
        self.log("my_epoch", number)
        self.log(f"own{dataloader_idx}", number, add_dataloader_idx=False)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate(batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate(batch_idx, dataloader_idx)

    def on_validation_epoch_end(self):
        self.log("whole", 7.0)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_names_with_several_loaders_are_lightnings(stage):
    logger = Kept()
    trainer = sg.Trainer(**QUIET | {"logger": [logger]})
    first, second = getattr(trainer, stage)(Evaluated(), [loader(), loader(16)])
    whole = {"whole": 7.0} if stage == "validate" else {}

    assert first == {
        "both_epoch/dataloader_idx_0": 1.5, "both/dataloader_idx_0": 1.5, "my_epoch/dataloader_idx_0": 1.5, "own0": 1.5,
    } | whole  # fmt: skip
    assert second == {
        "both_epoch/dataloader_idx_1": 10.5, "both/dataloader_idx_1": 10.5, "my_epoch/dataloader_idx_1": 10.5, "own1": 10.5,
    } | whole  # fmt: skip
    found = {name: float(value) for name, value in trainer.published.exact.items()}
    assert found == first | second | {
        "both_step/dataloader_idx_0": 3.0, "each/dataloader_idx_0": 3.0,
        "both_step/dataloader_idx_1": 11.0, "each/dataloader_idx_1": 11.0,
    }  # fmt: skip
    assert logger.of("both_step/dataloader_idx_0") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert logger.of("each/dataloader_idx_1") == [(1, 10.0), (2, 11.0)]
    assert logger.of("both_epoch/dataloader_idx_0") == [(0, 1.5)]
    assert logger.of("both/dataloader_idx_0") == []


def test_names_with_one_loader():
    (found,) = sg.Trainer(**QUIET).validate(Evaluated(), loader())

    assert found == {"both_epoch": 1.5, "both": 1.5, "my_epoch": 1.5, "own0": 1.5, "whole": 7.0}


def test_one_name_for_two_loaders_is_refused_rather_than_mixed():
    class Mixed(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("a", 1.0, add_dataloader_idx=False)

    with pytest.raises(
        sg.StratagemError, match=r"log\('a', add_dataloader_idx=False\) was called for loader 0 and for 1"
    ):
        sg.Trainer(**QUIET).validate(Mixed(), [loader(), loader()])


def test_two_metrics_of_one_name_are_refused():
    class Twice(Net):
        def training_step(self, batch, batch_idx):
            self.log("a", 1.0, on_step=True, on_epoch=True)
            self.log("a_step", 2.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(sg.StratagemError, match=r"log\('a_step'\) takes the name 'a_step' of log\('a'\)"):
        sg.Trainer(max_epochs=1, **QUIET).fit(Twice(), loader())


def test_steps_of_validation_reach_loggers_and_count_on():
    """The step axis counts the batches of a loader over all validations, without the sanity check."""
    logger = Kept()
    trainer = sg.Trainer(max_epochs=2, val_check_interval=2, **QUIET | {"logger": [logger]})
    trainer.fit(Evaluated(), loader(), loader(16))

    assert logger.of("each") == [(n, float((n - 1) % 2)) for n in range(1, 9)]
    assert logger.of("both_step") == logger.of("each")
    assert [step for step, _ in logger.of("both_epoch")] == [2, 4, 6, 8]


def test_steps_of_validation_count_on_after_resuming(tmp_path):
    logger = Kept()
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Evaluated(), loader(), loader(16))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = sg.Trainer(max_epochs=2, **QUIET | {"logger": [logger]})
    resumed.fit(Evaluated(), loader(), loader(16), ckpt_path=tmp_path / "a.ckpt")

    assert [step for step, _ in logger.of("each")] == [3, 4]


def test_steps_of_validation_are_in_the_csv_file(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET | {"logger": "csv", "default_root_dir": tmp_path})
    trainer.fit(Evaluated(), loader(), loader(16))
    (path,) = tmp_path.rglob("metrics.csv")

    assert [row["step"] for row in csv.DictReader(path.open()) if row.get("both_step")] == ["1", "2"]


# --- Every event ----------------------------------------------------------------------------------------------------

#: Where a log has nothing to be reduced with, or comes too late.
CLOSED = {
    "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_test_end", "on_load_checkpoint",
    "on_predict_start", "on_predict_end", "on_predict_batch_start", "on_predict_batch_end", "on_predict_epoch_start",
    "on_predict_epoch_end", "on_sanity_check_start", "on_sanity_check_end", "setup", "teardown", "configure_optimizers", "configure_model", "prepare_data", "predict_step",
}  # fmt: skip
STEPS = {"training_step", "validation_step", "test_step"}
EVENTS_OF_A_RUN = [name for name in EVENTS if name != "on_exception"]
OF_MODULES = [
    *EVENTS_OF_A_RUN,
    *sorted(STEPS),
    "predict_step",
    "setup",
    "teardown",
    "configure_optimizers",
    "configure_model",
]
OF_CALLBACKS = [
    name for name in hook_specifications() if name.startswith("on_") and name not in ("on_exception", "on_connect")
]


def logs_in(base, event, passes_module):
    """Return a subclass of `base` that logs 3.0 in `event`, then does what `base` does there."""
    had = getattr(base, event, None)

    def told(self, *arguments, **options):
        module = options.get("module", self)
        module.log("logged", 3.0, **module.options)
        return had(self, *arguments, **options) if had is not None and not passes_module else None

    if passes_module:
        parameters = list(inspect.signature(hook_functions()[event]).parameters)
        space = {"told": told}
        exec(f"def {event}(self, {', '.join(parameters)}):\n    return told(self, module=module)\n", space)
        return type("Logs", (base,), {event: sg.hookimpl(space[event])})
    return type("Logs", (base,), {event: told})


class Plain(Net):
    options = {}  # noqa: RUF012


def live(trainer, module, path):
    """Lead `trainer` through every stage; return what reached callbacks and loggers under "logged"."""
    logger, found = trainer.logger, []

    def collect():
        names = [name for name in trainer.callback_metrics if name.startswith("logged")]
        found.extend((name, float(trainer.callback_metrics[name])) for name in names)
        trainer.callback_metrics.clear()

    trainer.fit(module, loader(), loader())
    collect()
    trainer.save_checkpoint(path)
    trainer.max_epochs = 2
    trainer.fit(module, loader(), loader(), ckpt_path=path)
    collect()
    for stage in ("test", "predict"):
        getattr(trainer, stage)(module, loader())
        collect()
    return found, [value for name in ("logged", "logged_epoch", "logged_step") for _, value in logger.of(name)]


@pytest.mark.every_push("on_fit_start", "on_sanity_check_start", "on_predict_batch_start")
@pytest.mark.parametrize("event", OF_CALLBACKS)
def test_what_callbacks_log_lands_or_is_refused(tmp_path, event):
    _check(tmp_path, event, Plain(), [logs_in(sg.Callback, event, True)()])


@pytest.mark.every_push(
    "on_fit_start",
    "on_train_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "setup",
    "configure_optimizers",
    "configure_model",
)
@pytest.mark.parametrize("event", OF_MODULES)
def test_what_modules_log_lands_or_is_refused(tmp_path, event):
    _check(tmp_path, event, logs_in(Plain, event, False)(), [])


def _check(tmp_path, event, module, callbacks):
    options = {"logger": [Kept()], "log_every_n_steps": 1, "callbacks": callbacks}
    trainer = sg.Trainer(max_epochs=1, **QUIET | options)
    if event in CLOSED | {"on_save_checkpoint"}:
        with pytest.raises(sg.StratagemError, match=r"log\('logged'\) was called") as caught:
            live(trainer, module, tmp_path / "a.ckpt")
        assert "expected" in str(caught.value)
        return
    found, logged = live(trainer, module, tmp_path / "a.ckpt")
    assert set(found) == {("logged", 3.0)}
    assert set(logged) == {3.0}


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_validation_epoch_end", "on_validation_start"])
def test_a_step_is_not_logged_where_there_is_none(event):
    module = logs_in(Plain, event, False)()
    module.options = {"on_step": True}

    with pytest.raises(sg.StratagemError, match=rf"log\('logged', on_step=True\) was called in {event}"):
        sg.Trainer(max_epochs=1, **QUIET).fit(module, loader(), loader())


class AtTheEnd(sg.Callback):
    def __init__(self, **options):
        self.options = options

    @sg.hookimpl
    def on_train_epoch_end(self, trainer, module):
        module.log("late", float(trainer.current_epoch + 10 * trainer.global_rank), **self.options)


def test_a_metric_that_a_callback_logs_at_an_epochs_end_can_be_monitored():
    """By a callback after it, and with a value of each epoch."""
    watch = {"name": "early_stopping", "monitor": "late", "mode": "min", "patience": 1}
    logger = Kept()
    trainer = sg.Trainer(max_epochs=5, callbacks=[AtTheEnd(prog_bar=True), watch], **QUIET | {"logger": [logger]})
    trainer.fit(Net(), loader())

    assert trainer.current_epoch == 2
    assert logger.of("late") == [(4, 0.0), (8, 1.0)]
    assert float(trainer.progress_bar_metrics["late"]) == 1.0


@pytest.mark.parametrize(("options", "message"), [
    ({"on_step": True}, r"log\('late', on_step=True\) was called in on_train_epoch_end"),
    ({"on_epoch": False}, r"log\('late', on_epoch=False\) was called in on_train_epoch_end"),
])  # fmt: skip
def test_what_a_callback_cannot_log_at_an_epochs_end_is_refused(options, message):
    with pytest.raises(sg.StratagemError, match=message):
        sg.Trainer(max_epochs=1, callbacks=[AtTheEnd(**options)], **QUIET).fit(Net(), loader())


def test_two_values_of_a_name_at_an_epochs_end_are_refused():
    with pytest.raises(sg.StratagemError, match=r"log\('late'\) was called twice in on_train_epoch_end"):
        sg.Trainer(max_epochs=1, callbacks=[AtTheEnd(), AtTheEnd()], **QUIET).fit(Net(), loader())


class OnRankZero(sg.Callback):
    @sg.hookimpl
    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            module.log("alone", 1.0)


def _late_on_two(rank, world_size):
    callbacks = [AtTheEnd(sync_dist=True), OnRankZero()]
    trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, callbacks=callbacks, **QUIET)
    trainer.fit(Net(), loader())
    return float(trainer.callback_metrics["late"]), "alone" in trainer.callback_metrics


def test_callbacks_log_at_an_epochs_end_over_ranks():
    assert run_in_processes(_late_on_two, 2) == [(5.0, True), (5.0, False)]


def test_a_training_metric_named_like_an_epochs_keeps_its_name():
    class Named(Net):
        def training_step(self, batch, batch_idx):
            self.log("last_epoch", 2.0, on_step=False, on_epoch=True)
            self.log("first_step", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Named(), loader())

    assert {name for name in trainer.callback_metrics if "st" in name} == {"last_epoch", "first_step"}
    assert isinstance(trainer.callback_metrics["last_epoch"], torch.Tensor)
