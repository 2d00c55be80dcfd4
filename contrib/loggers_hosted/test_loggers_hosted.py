"""Each logger passes the checks for loggers with its client library, offline, and the library finds what was logged."""

import json
import math
import os
import pickle
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, ClassVar

# Where these libraries write is read when they are imported, and none of them may use the network.
STORE = Path(tempfile.mkdtemp(prefix="stratagem-test-"))
os.environ |= {"TRACKIO_DIR": f"{STORE}/trackio", "CLEARML_CACHE_DIR": f"{STORE}/clearml", "HF_HUB_OFFLINE": "1"}
os.environ |= {
    "COMET_LOGGING_CONSOLE": "ERROR",
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_AUTO_LOG_ENV_DETAILS": "false",
    "HOME": str(STORE),
}

import pytest  # noqa: E402

# In the process whose forks the kit tests.
aim, clearml, comet_ml, trackio = map(pytest.importorskip, ("aim", "clearml", "comet_ml", "trackio"))

from aim.sdk.index_manager import RepoIndexManager  # noqa: E402
from aim.storage.context import Context  # noqa: E402
from trackio.sqlite_storage import SQLiteStorage  # noqa: E402

import stratagem  # noqa: E402
from stratagem.errors import ConfigError, PluginError  # noqa: E402
from stratagem.loggers import AimLogger, ClearMLLogger, CometLogger, TrackioLogger  # noqa: E402
from stratagem_testing import LoggerConformance, run_in_processes  # noqa: E402
from stratagem_testing.processes import ProcessesFailed  # noqa: E402
from stratagem_testing.reference import Net, joined_batches  # noqa: E402
from stratagem_testing.training import share  # noqa: E402

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "log_every_n_steps": 1}
NAMES = ("comet", "aim", "trackio", "clearml")
CLASSES = {"comet": CometLogger, "aim": AimLogger, "trackio": TrackioLogger, "clearml": ClearMLLogger}


class TestComet(LoggerConformance):
    plugin: ClassVar[Any] = {"name": "comet", "offline": True}


class TestAim(LoggerConformance):
    plugin = "aim"


class TestTrackio(LoggerConformance):
    plugin = "trackio"
    test_it_writes_on_rank_0_alone = None  # not below default_root_dir: test_one_run_of_two_ranks


class TestClearML(LoggerConformance):
    plugin: ClassVar[Any] = {"name": "clearml", "offline": True}
    test_it_writes_on_rank_0_alone = None  # nor are these


class Described(Net):
    def __init__(self, lr=5e-3, nested=None):
        super().__init__(lr=lr)
        self.save_hyperparameters()


def made(logger, **options):
    """Return a logger that uses no network."""
    offline = {"offline": True} if logger in ("comet", "clearml") else {}
    return CLASSES[logger](**offline, **options)


def fit(logger, tmp_path, module=None, **arguments):
    trainer = stratagem.Trainer(logger=logger, **(QUIET | {"max_epochs": 1, "default_root_dir": tmp_path} | arguments))
    trainer.fit(module or Net(), joined_batches(3, 8))
    trainer.close()
    return trainer


def log(logger, metrics, step, tmp_path):
    logger.log_metrics(metrics, step, stratagem.Run(accelerator="cpu", default_root_dir=tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_one_run_of_two_ranks(name, tmp_path):
    """Before this process logs to Aim itself: it forks the ranks."""
    identities = run_in_processes(_fit, 2, tmp_path, name)

    assert identities[1] is None
    assert [step for step, _ in history(name, identities[0], tmp_path)] == [1, 2]


class Tags(Net):
    def on_train_start(self):
        self.logger.experiment.add_tag("from the module")


def _fit(rank, size, folder, name):
    logger = made(name)
    trainer = stratagem.Trainer(**QUIET, devices=size, max_epochs=1, default_root_dir=folder, logger=logger)
    trainer.fit(Net() if name in ("trackio", "clearml") else Tags(), share(trainer, joined_batches(2, 8)))
    trainer.close()
    return logger.run_id


# --- What the libraries find -------------------------------------------------------------------------------------


def history(name, run_id, tmp_path, metric="train_loss", project="stratagem_logs"):
    """Return (step, value) of a metric, as the client library reads them."""
    return list(READERS[name](run_id, tmp_path, metric, project))


def comet_history(run_id, tmp_path, metric, project):
    for message in comet_messages(tmp_path, "metric_msg"):
        if message["metric"]["metricName"] == metric:
            yield message["metric"]["step"], message["metric"]["metricValue"]


def comet_messages(tmp_path, kind):
    for archive in sorted(tmp_path.glob("*.zip"), key=os.path.getmtime):
        for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines():
            message = json.loads(line)
            if message["type"] == kind:
                yield message["payload"]


def aim_history(run_id, tmp_path, metric, project):
    run = aim_run(run_id, tmp_path)
    assert run.experiment == project
    rows = run.get_metric(metric, Context({})).dataframe()
    return sorted(zip(rows["step"].tolist(), rows["value"].tolist(), strict=True))


def aim_run(run_id, tmp_path):
    repo = aim.Repo(str(tmp_path))
    RepoIndexManager.get_index_manager(repo).index(run_id)  # as `aim up` does before it reads
    return aim.Run(run_id, repo=repo, read_only=True)


def trackio_history(run_id, tmp_path, metric, project):
    return [(row["step"], row[metric]) for row in SQLiteStorage.get_logs(project, run_id) if metric in row]


def clearml_history(run_id, tmp_path, metric, project):
    title, _, series = metric.partition("/")
    for row in clearml_archive(run_id, "metrics.jsonl"):
        if (row["metric"], row["variant"]) == (title, series or title):
            yield row["iter"], row["value"]


def clearml_archive(run_id, name):
    text = zipfile.ZipFile(STORE / "clearml" / "offline" / f"{run_id}.zip").read(name).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    return [each for line in lines for each in (line if isinstance(line, list) else [line])]


READERS = {"comet": comet_history, "aim": aim_history, "trackio": trackio_history, "clearml": clearml_history}


@pytest.mark.parametrize("name", NAMES)
def test_every_logged_step_has_its_loss(name, tmp_path):
    losses = []

    class Keeps(Net):
        def on_train_batch_end(self, outputs):
            losses.append(float(outputs.detach()))

    logger = made(name)
    fit(logger, tmp_path, Keeps(), max_epochs=2)

    found = history(name, logger.run_id, tmp_path)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found] == pytest.approx(losses)


@pytest.mark.parametrize("name", NAMES)
def test_version_continues_a_run(name, tmp_path):
    first = made(name)
    log(first, {"a/b": 1.0}, 1, tmp_path)
    first.close()
    log(first, {"a/b": 2.0}, 2, tmp_path)
    first.close()
    second = made(name, version=first.run_id)
    log(second, {"a/b": 3.0}, 3, tmp_path)
    second.close()

    assert second.run_id == first.run_id
    assert history(name, first.run_id, tmp_path, "a/b") == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("name", NAMES)
def test_hyper_parameters(name, tmp_path):
    logger = made(name)
    fit(logger, tmp_path, Described(nested={"width": 3}))

    assert hyper_parameters(name, logger.run_id, tmp_path) == {"lr": 0.005, "nested": {"width": 3}}


def hyper_parameters(name, run_id, tmp_path):
    if name == "comet":
        found = [each.get("param") or each.get("params") for each in comet_messages(tmp_path, "parameter_msg")]
        found = {each["paramName"]: each["paramValue"] for each in found}
        return {"lr": found["lr"], "nested": {"width": found["nested|width"]}}
    if name == "aim":
        return aim_run(run_id, tmp_path)["hparams"]
    if name == "trackio":
        config = SQLiteStorage.get_run_config("stratagem_logs", run_id)
        return {key: value for key, value in config.items() if not key.startswith("_")}
    (task,) = clearml_archive(run_id, "task.json")
    general = {key: json.loads(value["value"]) for key, value in task["hyperparams"]["General"].items()}
    return {"lr": general["lr"], "nested": {"width": general["nested/width"]}}


@pytest.mark.parametrize("name", NAMES)
def test_options_reach_the_library(name, tmp_path):
    logger = made(name, project="digits", name="first", tags=["small"])
    log(logger, {"a": 1.0}, 1, tmp_path)
    logger.close()

    if name == "comet":
        (archive,) = tmp_path.glob("*.zip")
        described = json.loads(zipfile.ZipFile(archive).read("experiment.json"))
        assert (described["project_name"], described["tags"]) == ("digits", ["small"])
    elif name == "aim":
        run = aim_run(logger.run_id, tmp_path)
        assert (run.experiment, run.name, run.tags) == ("digits", "first", ["small"])
    elif name == "trackio":
        assert logger.run_id == "first"
        assert SQLiteStorage.get_run_config("digits", "first")["tags"] == ["small"]
    else:
        (task,) = clearml_archive(logger.run_id, "task.json")
        assert (task["project_name"], task["name"], task["tags"]) == ("digits", "first", ["small"])


@pytest.mark.parametrize("name", ["comet", "aim", "trackio"])
def test_values_that_are_not_finite_are_kept(name, tmp_path):
    logger = made(name)
    for step, value in enumerate([math.nan, math.inf, -math.inf]):
        log(logger, {"größe": value}, step, tmp_path)
    logger.close()

    (_, first), *others = history(name, logger.run_id, tmp_path, "größe")
    assert math.isnan(float(first))
    assert [float(value) for _, value in others] == [math.inf, -math.inf]


def test_clearml_gets_no_zero_for_a_value_that_is_not_finite(tmp_path):
    logger = made("clearml")
    for step, value in enumerate([math.nan, 1.0, math.inf]):
        log(logger, {"a": value}, step, tmp_path)
    logger.close()

    assert history("clearml", logger.run_id, tmp_path, "a") == [(1, 1.0)]


# --- Errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_is_an_error_before_training(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, {"comet": "comet_ml"}.get(name, name), None)

    with pytest.raises(PluginError, match=rf'pip install "stratagem-loggers-hosted\[{name}\]"'):
        fit(made(name), tmp_path)


def test_aim_in_a_process_forked_from_one_that_logs_to_it_is_refused(tmp_path):
    log(logger := made("aim"), {"a": 1.0}, 1, tmp_path)
    logger.close()
    with pytest.raises(ProcessesFailed, match=r"rank 0 .*'aim' logged before this process was forked.*ddp_spawn"):
        run_in_processes(_fit, 2, tmp_path, "aim")


def test_an_exception_is_in_the_run(tmp_path):
    class Fails(Net):
        def on_train_epoch_end(self):
            raise ValueError("out of order")

    logger = made("aim")
    with pytest.raises(ValueError, match="out of order"):
        fit(logger, tmp_path, Fails())

    run = aim_run(logger.run_id, tmp_path)
    assert run["failed"] == "ValueError: out of order"
    assert not run.active


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"'comet' could not start a run .*file"):
        fit(made("comet", save_dir=tmp_path / "file"), tmp_path, Described())


def test_experiment_is_the_run_of_the_library(tmp_path):
    logger = made("aim")
    with pytest.raises(ConfigError, match="outside a run"):
        logger.experiment  # noqa: B018
    log(logger, {"a": 1.0}, 1, tmp_path)

    assert isinstance(logger.experiment, aim.Run)
    assert logger.written_files() == {"aim": str(tmp_path / ".aim")}
    logger.close()
    assert logger.written_files() == {}


def test_a_pickled_logger_continues_a_run_that_ended_and_leaves_an_open_one(tmp_path):
    logger = made("aim")
    log(logger, {"a": 1.0}, 1, tmp_path)
    assert pickle.loads(pickle.dumps(logger)).run_id is None
    logger.close()
    copy = pickle.loads(pickle.dumps(logger))
    log(copy, {"a": 2.0}, 2, tmp_path)
    copy.close()

    assert history("aim", logger.run_id, tmp_path, "a") == [(1, 1.0), (2, 2.0)]
