"""`mlflow` passes the checks for loggers; MLflow's client finds all logged values, and the status of the run."""

import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings

import mlflow
import pytest
from mlflow.tracking import MlflowClient

import stratagem
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigError, PluginError, StratagemError
from stratagem.loggers import MLflowLogger
from stratagem_testing import LoggerConformance, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "log_every_n_steps": 1}


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Keep the user's stores out of it."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


class TestMLflow(LoggerConformance):
    plugin = "mlflow"


class Described(Net):
    def __init__(self, lr=5e-3, nested=None, note=""):
        super().__init__(lr=lr)
        self.save_hyperparameters()


def fit(tmp_path, module=None, ckpt_path=None, logger="mlflow", **arguments):
    arguments = QUIET | {"max_epochs": 1, "default_root_dir": tmp_path} | arguments
    trainer = stratagem.Trainer(logger=logger, **arguments)
    trainer.fit(module or Net(), joined_batches(3, 8), ckpt_path=ckpt_path)
    return trainer


def log(logger, metrics, step, tmp_path):
    logger.log_metrics(metrics, step, stratagem.Run(accelerator="cpu", default_root_dir=tmp_path))


def client_of(tmp_path):
    assert (tmp_path / "mlflow.db").is_file()
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


def runs(tmp_path, experiment="stratagem_logs"):
    client = client_of(tmp_path)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def history(tmp_path, name):
    (run,) = runs(tmp_path)
    return [(each.step, each.value) for each in client_of(tmp_path).get_metric_history(run.info.run_id, name)]


# --- What is logged ----------------------------------------------------------------------------------------------


def test_every_logged_step_has_its_loss(tmp_path):
    losses = []

    class Keeps(Net):
        def on_train_batch_end(self, outputs):
            losses.append(float(outputs.detach()))

    fit(tmp_path, Keeps(), max_epochs=2)

    assert history(tmp_path, "train_loss") == [(step + 1, loss) for step, loss in enumerate(losses)]
    assert history(tmp_path, "epoch") == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]


def test_hyper_parameters_become_params(tmp_path):
    fit(tmp_path, Described(nested={"widths": [1, 2], "deep": {"drop": 0.5}}))

    (run,) = runs(tmp_path)
    assert run.data.params == {"lr": "0.005", "nested/widths": "[1, 2]", "nested/deep/drop": "0.5", "note": ""}


def test_more_hyper_parameters_than_one_request_takes(tmp_path):
    fit(tmp_path, Described(nested={f"n{number}": number for number in range(250)}))

    (run,) = runs(tmp_path)
    assert run.data.params["nested/n249"] == "249"
    assert len(run.data.params) == 252


def test_a_long_hyper_parameter_is_cut_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="'note' has 7000 characters: MLflow keeps the first 6000"):
        fit(tmp_path, Described(note="x" * 7000))

    (run,) = runs(tmp_path)
    assert run.data.params["note"] == "x" * 6000


def test_values_that_are_not_finite_are_kept(tmp_path):
    logger = MLflowLogger()
    for step, value in enumerate([math.nan, math.inf, -math.inf]):
        log(logger, {"größe of/it": value}, step, tmp_path)
    logger.close()

    (_, first), *others = history(tmp_path, "größe of/it")
    assert math.isnan(first)
    assert others == [(1, sys.float_info.max), (2, -sys.float_info.max)]  # as MLflow's SQL stores keep infinity


def test_names_that_mlflow_refuses_are_replaced_and_stay_apart(tmp_path):
    logger = MLflowLogger()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        log(logger, {"loss[%]": 1.0, "loss(%)": 2.0, "../up": 3.0}, 0, tmp_path)
        log(logger, {"loss[%]": 4.0}, 1, tmp_path)
    logger.close()

    said = [str(each.message) for each in warned if "does not accept" in str(each.message)]
    assert said[0] == "MLflow does not accept metric name 'loss[%]': it is logged as 'loss___'"
    assert len(said) == 3
    (run,) = runs(tmp_path)
    assert run.data.metrics == {"loss___": 4.0, "loss____2": 2.0, "up": 3.0}


@pytest.mark.parametrize("name", ["50%", "100%20", "a?b"])
def test_folders_with_characters_that_mean_something_in_a_url(tmp_path, name):
    logger = MLflowLogger()
    log(logger, {"a": 1.0}, 1, tmp_path / name)
    identity = logger.run_id
    logger.close()
    log(logger, {"a": 2.0}, 2, tmp_path / name)

    assert (tmp_path / name / "mlflow.db").stat().st_size > 0
    assert [each.value for each in logger.experiment.get_metric_history(identity, "a")] == [1.0, 2.0]
    logger.close()


def test_options_reach_the_run(tmp_path):
    store = f"sqlite:///{tmp_path}/other.db"
    logger = MLflowLogger(experiment_name="digits", run_name="first", tracking_uri=store, tags={"size": "small"})
    log(logger, {"a": 1.0}, 1, tmp_path / "elsewhere")
    logger.close()

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_name, run.info.run_id, run.data.tags["size"]) == ("first", logger.run_id, "small")
    assert not (tmp_path / "elsewhere").exists()


def test_the_store_that_mlflow_was_told_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    fit(tmp_path / "elsewhere")

    assert len(runs(tmp_path)) == 1
    assert not (tmp_path / "elsewhere" / "mlflow.db").exists()


def test_a_folder_with_a_space_and_artifacts_beside_the_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a b#c"
    logger = MLflowLogger()
    log(logger, {"a": 1.0}, 1, folder)
    artifacts = logger.experiment.get_run(logger.run_id).info.artifact_uri
    logger.experiment.log_text(logger.run_id, "found", "note.txt")
    logger.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]
    assert (folder / "mlflow.db").stat().st_size > 0
    assert [path.read_text() for path in folder.rglob("note.txt")] == ["found"]
    assert "mlartifacts" in artifacts


def test_a_module_may_use_the_client_on_all_ranks(tmp_path):
    identities = run_in_processes(_fit_with_tag, 2, tmp_path)

    (run,) = runs(tmp_path)
    assert identities == [run.info.run_id, None]
    assert run.data.tags["from"] == "the module"


class Tags(Described):
    def on_train_start(self):
        logger = self.trainer.logger
        logger.experiment.set_tag(logger.run_id, "from", "the module")


def _fit_with_tag(rank, size, folder):
    trainer = stratagem.Trainer(**QUIET, devices=size, max_epochs=1, default_root_dir=folder, logger="mlflow")
    trainer.fit(Tags(), share(trainer, joined_batches(2, 8)))
    trainer.close()
    return trainer.logger.run_id


def test_nothing_is_created_before_there_is_something_to_log(tmp_path):
    class Silent(Net):
        def training_step(self, batch, batch_idx):
            return self.criterion(self(batch[0]), batch[1])

    trainer = fit(tmp_path, Silent())
    trainer.close()

    assert trainer.logger.run_id is None
    assert not (tmp_path / "mlflow.db").exists()
    with pytest.raises(ConfigError, match="experiment was read outside a run"):
        MLflowLogger().experiment  # noqa: B018


# --- How a run ends ----------------------------------------------------------------------------------------------


def test_a_run_is_finished_when_training_ends_and_takes_what_follows(tmp_path):
    seen = []

    class Looks(Net):
        def on_train_end(self):
            seen.append(runs(tmp_path)[0].info.status)

    trainer = fit(tmp_path, Looks())
    after_fit = runs(tmp_path)[0].info
    trainer.test(dataloaders=joined_batches(2, 8))
    trainer.close()
    trainer.close()

    (run,) = runs(tmp_path)
    assert (seen, after_fit.status, run.info.status) == (["RUNNING"], "FINISHED", "FINISHED")
    assert after_fit.end_time is not None
    assert [step for step, _ in history(tmp_path, "test_loss")] == [3]


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_run_that_an_exception_ended_says_so_and_keeps_what_it_logged(tmp_path, error, status):
    class Fails(Net):
        def on_train_batch_start(self, batch_idx):
            if batch_idx == 2:
                raise error

    trainer = stratagem.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path, logger="mlflow")
    with pytest.raises(error):
        trainer.fit(Fails(), joined_batches(3, 8))
    trainer.close()

    assert runs(tmp_path)[0].info.status == status
    assert [step for step, _ in history(tmp_path, "train_loss")] == [1, 2]


def test_a_test_that_fails_after_training_makes_the_run_failed(tmp_path):
    class Fails(Net):
        def test_step(self, batch, batch_idx):
            raise ValueError("out of order")

    trainer = fit(tmp_path, Fails())
    with pytest.raises(ValueError, match="out of order"):
        trainer.test(dataloaders=joined_batches(1, 8))

    assert runs(tmp_path)[0].info.status == "FAILED"


def test_a_second_fit_is_running_again(tmp_path):
    seen = []

    class Looks(Net):
        def on_train_start(self):
            found = runs(tmp_path) if (tmp_path / "mlflow.db").exists() else []
            seen.append([run.info.status for run in found])

    trainer = fit(tmp_path, Looks())
    trainer.max_epochs = 2
    trainer.fit(trainer.module, joined_batches(3, 8))

    assert seen == [[], ["RUNNING"]]
    assert runs(tmp_path)[0].info.status == "FINISHED"
    assert [step for step, _ in history(tmp_path, "train_loss")] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_with_the_same_id_is_the_same_run(tmp_path):
    first = fit(tmp_path, Described(), max_steps=2)
    first.save_checkpoint(tmp_path / "2.ckpt")
    first.close()
    logger = {"name": "mlflow", "id": first.logger.run_id}
    with pytest.warns(UserWarning, match=r"keeps its first value of lr \(lr stays 0.005, not 0.001\)"):
        fit(tmp_path, Described(lr=1e-3), max_epochs=2, ckpt_path=tmp_path / "2.ckpt", logger=logger)

    assert [step for step, _ in history(tmp_path, "train_loss")] == [1, 2, 3, 4, 5, 6]
    assert runs(tmp_path)[0].data.params["lr"] == "0.005"


# --- Lives -------------------------------------------------------------------------------------------------------


def test_closing_twice_and_logging_again_adds_to_the_run(tmp_path):
    logger = MLflowLogger()
    logger.close()
    for step in range(2):
        log(logger, {"a": step}, step, tmp_path)
        logger.close()
        logger.close()

    assert history(tmp_path, "a") == [(0, 0.0), (1, 1.0)]


def test_a_pickled_logger_has_no_client_and_the_same_run(tmp_path):
    logger = MLflowLogger()
    log(logger, {"a": 1}, 1, tmp_path)
    copy = pickle.loads(pickle.dumps(logger))
    copy.close()
    assert runs(tmp_path)[0].info.status == "RUNNING"
    log(copy, {"a": 2}, 2, tmp_path)
    logger.close()

    assert history(tmp_path, "a") == [(1, 1.0), (2, 2.0)]


def test_a_forked_process_has_connections_of_its_own(tmp_path):
    logger = MLflowLogger()
    log(logger, {"a": 1}, 1, tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_log_in_child, args=(logger, tmp_path))
    child.start()
    child.join(60)
    log(logger, {"a": 3}, 3, tmp_path)
    logger.close()

    assert child.exitcode == 0
    assert history(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def _log_in_child(logger, folder):
    assert not logger._is_open
    log(logger, {"a": 2}, 2, folder)
    logger.close()
    os._exit(0)


# --- What can go wrong -------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_told_to_all_ranks_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    said = run_in_processes(_fit_into, 2, tmp_path / "file" / "logs")

    assert all("default_root_dir is" in text and "is a file" in text and text.count("\n") == 0 for text in said), said


class Refuses(Net):
    def training_step(self, batch, batch_idx):
        raise AssertionError("training began")


def _fit_into(rank, size, folder):
    try:
        trainer = stratagem.Trainer(**QUIET, devices=size, max_epochs=1, logger="mlflow", default_root_dir=folder)
        trainer.fit(Refuses(), share(trainer, joined_batches(1, 8)))
    except StratagemError as error:
        return str(error)
    return "nothing"


def test_a_folder_that_cannot_be_written_is_told_by_the_first_metric(tmp_path):
    (tmp_path / "mlflow.db").mkdir()
    logger = MLflowLogger()
    with pytest.raises(ConfigError, match=r"default_root_dir is '.*', where mlflow.db cannot be written"):
        log(logger, {"a": 1}, 1, tmp_path)
    logger.close()


def test_a_server_that_does_not_answer_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"mlflow.tracking_uri, 'http://127.0.0.1:9', cannot be used") as caught:
        fit(tmp_path, Refuses(), logger={"name": "mlflow", "tracking_uri": "http://127.0.0.1:9"})

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"tracking_uri": "nowhere://x"}, {"id": "0" * 32}])
def test_a_store_or_a_run_that_is_not_there_is_named(tmp_path, option):
    ((_, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{value}.*cannot be used"):
        fit(tmp_path, Described(), logger={"name": "mlflow"} | option)


def test_a_deleted_experiment_is_named(tmp_path):
    fit(tmp_path, logger={"name": "mlflow", "experiment_name": "old"}).close()
    client = client_of(tmp_path)
    client.delete_experiment(client.get_experiment_by_name("old").experiment_id)

    with pytest.raises(ConfigError, match=r"mlflow.experiment_name is 'old', which was deleted"):
        fit(tmp_path, logger={"name": "mlflow", "experiment_name": "old"})


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)

    with pytest.raises(PluginError, match="pip install mlflow-skinny"):
        fit(tmp_path)


def test_choosing_it_imports_no_mlflow():
    code = (
        "import sys, stratagem as sg; sg.Trainer(logger='mlflow', accelerator='cpu');"
        "print(sorted(name for name in sys.modules if 'mlflow' in name))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert mlflow.__version__
    assert result.stdout.strip() == "['stratagem_mlflow']"


# --- Checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log_model", "names"), [(True, ["epoch=1.ckpt"]), ("all", ["epoch=0.ckpt", "epoch=1.ckpt"])])
def test_checkpoints_are_artifacts(tmp_path, log_model, names):
    callback = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}")
    options = {"callbacks": [callback], "enable_checkpointing": True, "max_epochs": 2}
    trainer = fit(tmp_path, logger={"name": "mlflow", "log_model": log_model}, **options)
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    trainer.close()

    (run,) = runs(tmp_path)
    client = client_of(tmp_path)
    found = client.list_artifacts(run.info.run_id, "checkpoints")
    assert [each.path for each in found] == [f"checkpoints/{name}" for name in names]
    assert found[-1].file_size == os.path.getsize(tmp_path / "kept" / "epoch=1.ckpt")
    assert run.info.status == "FINISHED"


def test_uploading_needs_a_callback_that_keeps_checkpoints(tmp_path):
    with pytest.raises(ConfigError, match=r"mlflow.log_model is 'all' and no callback saves checkpoints"):
        fit(tmp_path, logger={"name": "mlflow", "log_model": "all"})
