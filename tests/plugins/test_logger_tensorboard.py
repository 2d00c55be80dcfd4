"""TensorBoard's own readers find what was logged: scalars, hyper-parameters, the graph, and how a run ended."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigError, PluginError, StratagemError
from stratagem.loggers import TensorBoardLogger
from stratagem_testing import LoggerConformance, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.plugins.hparams.backend_context import Context

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "log_every_n_steps": 1}


class TestTensorBoard(LoggerConformance):
    plugin = "tensorboard"


class Described(Net):
    def __init__(self, lr: float = 5e-3, nested: object = None, flag: bool = True, note: str = "plain") -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()


def fit(tmp_path, module=None, batches=3, ckpt_path=None, logger="tensorboard", **arguments):
    trainer = sg.Trainer(
        **(QUIET | {"max_epochs": 1, "default_root_dir": tmp_path} | arguments), logger=logger
    )  # fmt: skip
    trainer.fit(module or Net(), joined_batches(batches, 8), ckpt_path=ckpt_path)
    return trainer


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars(folder, name):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def sessions(folder):
    """Return what the hparams plugin keeps beside the summaries, by tag."""
    contents = read(folder).PluginTagToContent("hparams")
    parsed = {tag: plugin_data_pb2.HParamsPluginData.FromString(content) for tag, content in contents.items()}
    start = parsed[metadata.SESSION_START_INFO_TAG].session_start_info
    end = parsed.get(metadata.SESSION_END_INFO_TAG)
    return start, None if end is None else end.session_end_info.status


def log(logger, metrics, step, tmp_path):
    logger.log_metrics(metrics, step, sg.Run(accelerator="cpu", default_root_dir=tmp_path))


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_every_logged_step_is_a_point_with_the_loss_of_that_step(tmp_path):
    losses = []

    class Keeps(Net):
        def on_train_batch_end(self, outputs):
            losses.append(float(outputs.detach()))

    trainer = fit(tmp_path, Keeps(), max_epochs=2)

    folder = tmp_path / "stratagem_logs" / "version_0"
    assert trainer.logger.log_dir == folder
    assert scalars(folder, "train_loss") == [(step + 1, pytest.approx(loss)) for step, loss in enumerate(losses)]
    assert scalars(folder, "epoch") == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]


def test_steps_are_the_optimizers_not_the_batches(tmp_path):
    fit(tmp_path, batches=6, accumulate_grad_batches=2)

    assert [step for step, _ in scalars(tmp_path / "stratagem_logs" / "version_0", "train_loss")] == [1, 2, 3]


def test_names_and_values_that_are_not_finite_are_kept(tmp_path):
    logger = TensorBoardLogger()
    values = [math.nan, math.inf, -math.inf]
    for step, value in enumerate(values):
        log(logger, {"a/b c": value, "größe": 1.0}, step, tmp_path)
    logger.close()

    kept = [value for _, value in scalars(logger.log_dir, "a/b c")]
    assert math.isnan(kept[0])
    assert kept[1:] == values[1:]
    assert len(scalars(logger.log_dir, "größe")) == 3


@pytest.mark.slow
def test_evaluation_after_training_is_added(tmp_path):
    trainer = fit(tmp_path)
    trainer.test(dataloaders=joined_batches(2, 8))
    trainer.close()
    trainer.validate(dataloaders=joined_batches(2, 8))
    trainer.close()

    assert [step for step, _ in scalars(trainer.logger.log_dir, "test_loss")] == [3]
    assert [step for step, _ in scalars(trainer.logger.log_dir, "val_loss")] == [3]


def test_what_was_logged_can_be_read_while_the_run_goes_on(tmp_path):
    seen = []

    class Looks(Net):
        def on_train_batch_start(self, batch_idx):
            if batch_idx == 2:
                seen.append([step for step, _ in scalars(self.trainer.logger.log_dir, "train_loss")])

    trainer = sg.Trainer(
        **QUIET, max_epochs=1, default_root_dir=tmp_path, logger="tensorboard", val_check_interval=2,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Looks(), joined_batches(4, 8), joined_batches(1, 8))

    assert seen == [[1, 2]]


# --- Folders ---------------------------------------------------------------------------------------------------------


def test_another_run_gets_another_folder(tmp_path):
    for _ in range(2):
        fit(tmp_path)

    assert sorted(path.name for path in (tmp_path / "stratagem_logs").iterdir()) == ["version_0", "version_1"]


def test_two_runs_that_start_together_do_not_share_a_folder(tmp_path):
    folders = run_in_processes(_log_alone, 3, tmp_path)

    assert sorted(folder.name for folder in folders) == ["version_0", "version_1", "version_2"]


def _log_alone(rank, size, folder):
    logger = TensorBoardLogger(save_dir=folder)
    log(logger, {"a": 1.0}, 0, folder)
    logger.close()
    return logger.log_dir


def test_save_dir_name_and_version_make_the_folder(tmp_path):
    trainer = fit(tmp_path, logger={"name": "tensorboard", "save_dir": tmp_path / "deep" / "er", "version": "mine"})

    assert trainer.logger.log_dir == tmp_path / "deep" / "er" / "stratagem_logs" / "mine"
    assert len(scalars(trainer.logger.log_dir, "train_loss")) == 3


def test_nothing_is_created_before_there_is_something_to_log(tmp_path):
    class Silent(Net):
        def training_step(self, batch, batch_idx):
            return self.criterion(self(batch[0]), batch[1])

    trainer = fit(tmp_path, Silent())
    trainer.close()

    assert trainer.logger.log_dir is None
    assert not (tmp_path / "stratagem_logs").exists()


def test_only_rank_0_writes_and_a_module_may_use_the_writer_on_all(tmp_path):
    folders = run_in_processes(_fit_with_text, 2, tmp_path)

    assert folders == [tmp_path / "stratagem_logs" / "version_0", None]
    assert "note/text_summary" in read(folders[0]).Tags()["tensors"]
    assert len(list(folders[0].iterdir())) == 1


class Writes(Net):
    def on_train_start(self):
        self.trainer.logger.experiment.add_text("note", "from the module", 0)


def _fit_with_text(rank, size, folder):
    trainer = sg.Trainer(**QUIET, devices=size, max_epochs=1, default_root_dir=folder, logger="tensorboard")
    trainer.fit(Writes(), share(trainer, joined_batches(2, 8)))
    trainer.close()
    return trainer.logger.log_dir


def test_the_writer_is_refused_where_no_run_is():
    with pytest.raises(ConfigError, match="experiment was read outside a run"):
        TensorBoardLogger().experiment  # noqa: B018


def test_logs_at_a_url(tmp_path):
    upath = pytest.importorskip("upath")
    logger = TensorBoardLogger(save_dir=upath.UPath("memory://logs"))
    log(logger, {"a": 2.0}, 7, tmp_path)
    logger.close()
    other = TensorBoardLogger(save_dir=upath.UPath("memory://logs"))
    log(other, {"a": 2.0}, 7, tmp_path)
    other.close()

    assert scalars("memory://logs/stratagem_logs/version_0", "a") == [(7, 2.0)]
    assert other.log_dir.name == "version_1"


# --- Resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_continues_the_curves_of_its_version(tmp_path):
    logger = {"name": "tensorboard", "version": 0}
    whole = fit(tmp_path / "whole", max_epochs=3, logger=logger)
    first = fit(tmp_path, max_steps=4, max_epochs=3, logger=logger)
    first.save_checkpoint(tmp_path / "4.ckpt")
    lost = fit(tmp_path, max_steps=6, max_epochs=3, ckpt_path=tmp_path / "4.ckpt", logger=logger)  # as if killed at 6
    fit(tmp_path, max_epochs=3, ckpt_path=tmp_path / "4.ckpt", logger=logger)

    folder = tmp_path / "stratagem_logs" / "version_0"
    assert len(list(folder.iterdir())) == 3
    assert lost.logger.log_dir == folder
    assert scalars(folder, "train_loss") == scalars(whole.logger.log_dir, "train_loss")


@pytest.mark.slow
def test_a_second_fit_goes_on_where_the_first_stopped(tmp_path):
    trainer = fit(tmp_path)
    trainer.max_epochs = 2
    trainer.fit(trainer.module, joined_batches(3, 8))

    assert [step for step, _ in scalars(trainer.logger.log_dir, "train_loss")] == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name.split(".")[3] for path in trainer.logger.log_dir.iterdir())
    assert len(set(names)) == 2, "files of one second are not read in the order in which they were written"


# --- Hyper-parameters ------------------------------------------------------------------------------------------------


def test_hyper_parameters_keep_their_types_and_nested_ones_get_a_path(tmp_path):
    trainer = fit(tmp_path, Described(nested={"widths": [1, 2], "deep": {"drop": 0.5}}))
    trainer.close()

    start, status = sessions(trainer.logger.log_dir)
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert values == {
        "lr": 5e-3, "flag": True, "note": "plain", "nested/widths": "[1, 2]", "nested/deep/drop": 0.5,
    }  # fmt: skip
    assert type(values["flag"]) is bool
    assert status == api_pb2.STATUS_SUCCESS


@pytest.mark.parametrize("default_hp_metric", [True, False])
def test_the_hparams_tab_lists_the_runs_with_their_metrics(tmp_path, default_hp_metric):
    for lr in (1e-3, 2e-3):
        logger = {"name": "tensorboard", "default_hp_metric": default_hp_metric}
        fit(tmp_path, Described(lr=lr), logger=logger).close()

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(tmp_path))))
    tags = context.hparams_metadata(RequestContext(), "0")
    experiment = context.experiment_from_metadata(
        RequestContext(), "0", True, tags, context.hparams_from_data_provider(RequestContext(), "0", 100)
    )

    assert {info.name for info in experiment.hparam_infos} >= {"lr", "flag", "note"}
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert metrics == {"train_loss", "epoch"} | ({"hp_metric"} if default_hp_metric else set())
    assert len(tags) == 2


def test_a_module_replaces_the_default_metric(tmp_path):
    class Scores(Described):
        def training_step(self, batch, batch_idx):
            self.log("hp_metric", 0.5)
            return super().training_step(batch, batch_idx)

    trainer = fit(tmp_path, Scores(), batches=1)

    assert scalars(trainer.logger.log_dir, "hp_metric") == [(0, -1.0), (1, 0.5)]


def test_a_failed_run_says_so_and_keeps_what_it_logged(tmp_path):
    class Fails(Described):
        def on_train_batch_start(self, batch_idx):
            if batch_idx == 2:
                raise ValueError("out of order")

    trainer = sg.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path, logger="tensorboard")
    with pytest.raises(ValueError, match="out of order"):
        trainer.fit(Fails(), joined_batches(3, 8))
    kept = scalars(trainer.logger.log_dir, "train_loss")
    _, status = sessions(trainer.logger.log_dir)
    trainer.close()

    assert [step for step, _ in kept] == [1, 2]
    assert status == api_pb2.STATUS_FAILURE
    assert sessions(trainer.logger.log_dir)[1] == api_pb2.STATUS_FAILURE


def test_a_loop_of_ones_own_logs_hyper_parameters_at_once(tmp_path):
    run = sg.Run(accelerator="cpu", default_root_dir=tmp_path)
    logger = TensorBoardLogger()
    logger.log_hyperparams({"lr": 0.25}, run)
    logger.close()

    assert sessions(logger.log_dir)[0].hparams["lr"].number_value == 0.25


# --- The graph -------------------------------------------------------------------------------------------------------


class Drawn(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.ones(2, 16)
        self.norm, self.drop = torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.net(self.drop(self.norm(x)))


def test_the_graph_is_drawn_and_training_comes_out_the_same(tmp_path):
    logger = {"name": "tensorboard", "log_graph": True}
    states = []
    for chosen in (logger, "tensorboard"):
        sg.seed_everything(1)
        module = Drawn()
        trainer = fit(tmp_path, module, logger=chosen)
        states.append(module.state_dict())
        assert read(trainer.logger.log_dir).Tags()["graph"] == (chosen is logger)

    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_the_graph_needs_an_example(tmp_path):
    with pytest.raises(ConfigError, match=r"log_graph is True and Net has no example_input_array"):
        fit(tmp_path, logger={"name": "tensorboard", "log_graph": True})

    assert not (tmp_path / "stratagem_logs").exists()


def test_a_forward_that_cannot_be_traced_is_named(tmp_path):
    class Wrong(Drawn):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.ones(2, 3)

    with pytest.raises(ConfigError, match=r"Wrong.forward cannot be traced"):
        fit(tmp_path, Wrong(), logger={"name": "tensorboard", "log_graph": True})


# --- What can go wrong -----------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    steps = []

    class Counts(Net):
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    logger = {"name": "tensorboard", "save_dir": tmp_path / "file" / "logs"}
    with pytest.raises(ConfigError, match=r"tensorboard.save_dir leads to '.*file/logs/stratagem_logs', which cannot"):
        fit(tmp_path, Counts(), logger=logger)

    assert steps == []


def test_all_ranks_hear_of_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    said = run_in_processes(_fit_into, 2, tmp_path / "file")

    assert all("tensorboard.save_dir leads to" in text and text.count("\n") == 0 for text in said), said


def _fit_into(rank, size, folder):
    logger = TensorBoardLogger(save_dir=folder)
    trainer = sg.Trainer(**QUIET, devices=size, max_epochs=1, default_root_dir=folder.parent, logger=logger)
    try:
        trainer.fit(Net(), share(trainer, joined_batches(1, 8)))
    except StratagemError as error:
        return str(error)
    return "nothing"


def test_a_folder_that_cannot_be_made_is_told_by_the_first_metric(tmp_path):
    (tmp_path / "file").write_text("")
    logger = TensorBoardLogger(save_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"tensorboard.save_dir leads to"):
        log(logger, {"a": 1.0}, 0, tmp_path)
    logger.close()


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with pytest.raises(PluginError, match="pip install tensorboard"):
        fit(tmp_path)


@pytest.mark.slow
def test_choosing_it_imports_no_tensorboard():
    code = (
        "import sys, stratagem as sg; sg.Trainer(logger='tensorboard', accelerator='cpu');"
        "print(sorted(name for name in sys.modules if 'tensorboard' in name))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "['stratagem_logger_tensorboard']"


# --- Lives -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_closing_twice_and_logging_again_afterwards(tmp_path):
    logger = TensorBoardLogger()
    logger.close()
    for step in range(2):
        log(logger, {"a": step}, step, tmp_path)
        logger.close()
        logger.close()

    assert scalars(logger.log_dir, "a") == [(0, 0.0), (1, 1.0)]


@pytest.mark.slow
def test_a_pickled_logger_has_no_writer_and_the_same_folder(tmp_path):
    logger = TensorBoardLogger(version=3)
    log(logger, {"a": 1}, 1, tmp_path)
    copy = pickle.loads(pickle.dumps(logger))
    copy.close()
    log(copy, {"b": 2}, 2, tmp_path)
    copy.close()
    log(logger, {"a": 3}, 3, tmp_path)
    logger.close()

    assert scalars(logger.log_dir, "a") == [(1, 1.0), (3, 3.0)]
    assert scalars(logger.log_dir, "b") == [(2, 2.0)]


@pytest.mark.slow
def test_a_forked_process_leaves_its_parents_file_alone(tmp_path):
    logger = TensorBoardLogger(save_dir=tmp_path)
    log(logger, {"a": 1}, 1, tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_log_in_child, args=(logger, tmp_path))
    child.start()
    child.join(30)
    log(logger, {"a": 3}, 3, tmp_path)
    logger.close()

    assert child.exitcode == 0
    assert len(list(logger.log_dir.iterdir())) == 2
    assert sorted(scalars(logger.log_dir, "a")) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def _log_in_child(logger, folder):
    logger.flush()
    log(logger, {"a": 2}, 2, folder)
    logger.close()
    os._exit(0)
