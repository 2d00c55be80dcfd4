"""`wandb` passes the checks for loggers; wandb would send exactly what was logged."""

import json
import math
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
import wandb.proto.wandb_internal_pb2 as records_pb2

import stratagem
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigError, PluginError, StratagemError
from stratagem.loggers import WandbLogger
from stratagem_testing import LoggerConformance, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "log_every_n_steps": 1}
OFFLINE = {"name": "wandb", "offline": True}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """Isolate each test from the user's wandb account, settings and open runs."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield
    wandb.teardown()


class TestWandb(LoggerConformance):
    plugin = OFFLINE
    shares_processes = False  # wandb's server works in the folder of the first check, which is gone then


class Described(Net):
    def __init__(self, lr=5e-3, nested=None):
        super().__init__(lr=lr)
        self.save_hyperparameters()


def fit(tmp_path, module=None, ckpt_path=None, logger=OFFLINE, **arguments):
    arguments = QUIET | {"max_epochs": 1, "default_root_dir": tmp_path} | arguments
    trainer = stratagem.Trainer(logger=logger, **arguments)
    trainer.fit(module or Net(), joined_batches(3, 8), ckpt_path=ckpt_path)
    return trainer


def log(logger, metrics, step, tmp_path):
    logger.log_metrics(metrics, step, stratagem.Run(accelerator="cpu", default_root_dir=tmp_path))


def runs(tmp_path):
    """Return what each offline run would send, oldest first."""
    wandb.teardown()  # waits for wandb's own process, which writes later than `finish` returns
    return [list(_records(path)) for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]


def _records(path):
    """Read wandb's file: a header, then pieces of records in blocks of 32 KiB, as in a LevelDB log."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield records_pb2.Record.FromString(record)
            record = b""


def of_kind(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def history(records):
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in of_kind(records, "history")
    ]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def config(records):
    updates = [update for each in of_kind(records, "config") for update in each.update]
    return {update.key: json.loads(update.value_json) for update in updates}


# --- What is logged ----------------------------------------------------------------------------------------------


def test_every_logged_step_has_its_loss_and_its_number(tmp_path):
    losses = []

    class Keeps(Net):
        def on_train_batch_end(self, outputs):
            losses.append(float(outputs.detach()))

    fit(tmp_path, Keeps(), max_epochs=2).close()

    (records,) = runs(tmp_path)
    rows = [
        {"epoch": step // 3, "train_loss": loss, "trainer/global_step": step + 1} for step, loss in enumerate(losses)
    ]
    assert history(records) == rows
    (axis,) = [metric.step_metric for metric in of_kind(records, "metric") if metric.glob_name == "*"]
    assert axis == "trainer/global_step"
    assert of_kind(records, "exit")[-1].exit_code == 0


def test_hyper_parameters_become_the_config(tmp_path):
    fit(tmp_path, Described(nested={"widths": (1, 2), "none": None, "flag": True})).close()

    (records,) = runs(tmp_path)
    assert config(records) == {"lr": 5e-3, "nested": {"widths": [1, 2], "none": None, "flag": True}}


def test_a_custom_loop_logs_hyper_parameters_at_once_and_odd_ones_as_text(tmp_path):
    run, logger = stratagem.Run(accelerator="cpu", default_root_dir=tmp_path), WandbLogger(offline=True)
    logger.log_hyperparams({"device": torch.device("cpu"), "deep": [{"shape": torch.Size([2])}]}, run)
    logger.close()

    assert config(runs(tmp_path)[0]) == {"device": "cpu", "deep": [{"shape": [2]}]}


def test_values_that_are_not_finite_are_kept(tmp_path):
    logger = WandbLogger(offline=True)
    for step, value in enumerate([math.nan, math.inf, -math.inf]):
        log(logger, {"a/b c": value}, step, tmp_path)
    logger.close()

    kept = [row["a/b c"] for row in history(runs(tmp_path)[0])]
    assert math.isnan(float(kept[0]))
    assert [float(value) for value in kept[1:]] == [math.inf, -math.inf]


def test_options_reach_the_run(tmp_path):
    options = {"project": "digits", "id": "abc123", "tags": ["small", "cpu"], "group": "ablation"}
    logger = WandbLogger(name="first try", offline=True, save_dir=tmp_path / "deep" / "er", **options)
    log(logger, {"a": 1.0}, 1, tmp_path)
    logger.close()

    (records,) = runs(tmp_path / "deep" / "er")
    (run,) = of_kind(records, "run")
    assert (run.project, run.run_id, run.display_name) == ("digits", "abc123", "first try")
    assert (list(run.tags), run.run_group, logger.run_id) == (["small", "cpu"], "ablation", "abc123")
    assert not (tmp_path / "wandb").exists()


def test_a_module_may_use_the_run_on_all_ranks(tmp_path):
    identities = run_in_processes(_fit_with_summary, 2, tmp_path)

    (records,) = runs(tmp_path)
    assert identities == [of_kind(records, "run")[0].run_id, None]
    assert {"from": "the module"} in [
        {"/".join([update.key, *update.nested_key]).strip("/"): json.loads(update.value_json)}
        for summary in of_kind(records, "summary")
        for update in summary.update
    ]


class Summarizes(Net):
    def on_train_start(self):
        run = self.trainer.logger.experiment
        run.summary["from"] = "the module"
        run.name = "renamed"


def _fit_with_summary(rank, size, folder):
    trainer = stratagem.Trainer(**QUIET, devices=size, max_epochs=1, default_root_dir=folder, logger=OFFLINE)
    trainer.fit(Summarizes(), share(trainer, joined_batches(2, 8)))
    trainer.close()
    wandb.teardown()
    return trainer.logger.run_id


def test_nothing_is_created_before_there_is_something_to_log(tmp_path):
    class Silent(Net):
        def training_step(self, batch, batch_idx):
            return self.criterion(self(batch[0]), batch[1])

    trainer = fit(tmp_path, Silent())
    trainer.close()

    assert trainer.logger.run_id is None
    assert not (tmp_path / "wandb").exists()
    with pytest.raises(ConfigError, match="experiment was read outside a run"):
        WandbLogger().experiment  # noqa: B018


# --- Runs --------------------------------------------------------------------------------------------------------


def test_a_failed_run_is_marked_as_failed_and_keeps_what_it_logged(tmp_path):
    class Fails(Net):
        def on_train_batch_start(self, batch_idx):
            if batch_idx == 2:
                raise ValueError("out of order")

    with pytest.raises(ValueError, match="out of order"):
        fit(tmp_path, Fails())

    (records,) = runs(tmp_path)
    assert [row["trainer/global_step"] for row in history(records)] == [1, 2]
    assert of_kind(records, "exit")[-1].exit_code == 1
    assert wandb.run is None


def test_a_resumed_run_with_the_same_id_is_the_same_run(tmp_path):
    logger = OFFLINE | {"id": "mine"}
    first = fit(tmp_path, max_steps=2, logger=logger)
    first.save_checkpoint(tmp_path / "2.ckpt")
    first.close()
    fit(tmp_path, max_epochs=2, ckpt_path=tmp_path / "2.ckpt", logger=logger).close()

    parts = sorted(runs(tmp_path), key=lambda records: history(records)[0]["trainer/global_step"])
    assert [of_kind(records, "run")[0].run_id for records in parts] == ["mine", "mine"]
    assert [[row["trainer/global_step"] for row in history(records)] for records in parts] == [[1, 2], [3, 4, 5, 6]]


def test_closing_twice_and_logging_again_continues_the_run(tmp_path):
    logger = WandbLogger(offline=True)
    logger.close()
    for step in range(2):
        log(logger, {"a": step}, step, tmp_path)
        logger.close()
        logger.close()

    assert len({of_kind(records, "run")[0].run_id for records in runs(tmp_path)}) == 1
    assert sorted(row["a"] for records in runs(tmp_path) for row in history(records)) == [0, 1]


def test_a_run_that_the_program_opened_is_joined_and_left_open(tmp_path):
    mine = wandb.init(mode="offline", dir=str(tmp_path), project="sweep")
    trainer = fit(tmp_path / "elsewhere", Described(), logger="wandb")
    trainer.close()
    mine.log({"after": 1})
    mine.finish()

    (records,) = runs(tmp_path)
    assert trainer.logger.run_id == mine.id
    assert [row["trainer/global_step"] for row in history(records)[:3]] == [1, 2, 3]
    assert history(records)[3]["after"] == 1
    assert config(records)["lr"] == 5e-3
    assert not (tmp_path / "elsewhere" / "wandb").exists()


def test_options_that_choose_a_run_open_a_second_run(tmp_path):
    mine = wandb.init(mode="offline", dir=str(tmp_path / "mine"), project="sweep")
    trainer = fit(tmp_path, logger=OFFLINE | {"project": "digits"})
    trainer.close()
    mine.finish()

    (records,) = runs(tmp_path)
    assert of_kind(records, "run")[0].project == "digits"
    assert len(history(records)) == 3
    assert trainer.logger.run_id != mine.id


def test_a_pickled_logger_has_no_run(tmp_path):
    logger = WandbLogger(offline=True, tags=["a"])
    log(logger, {"a": 1}, 1, tmp_path)
    copy = pickle.loads(pickle.dumps(logger))
    copy.close()
    log(logger, {"a": 2}, 2, tmp_path)
    logger.close()

    assert (copy.tags, copy.run_id) == (["a"], None)  # the run stays with the process that has it open
    assert [row["a"] for row in history(runs(tmp_path)[0])] == [1, 2]


def test_a_forked_process_leaves_its_parents_run_alone(tmp_path):
    logger = WandbLogger(offline=True)
    log(logger, {"a": 1}, 1, tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_log_in_child, args=(logger, tmp_path))
    child.start()
    child.join(60)
    log(logger, {"a": 3}, 3, tmp_path)
    logger.close()

    assert child.exitcode == 0
    assert sorted([row["a"] for row in history(records)] for records in runs(tmp_path)) == [[1, 3], [2]]


def _log_in_child(logger, folder):
    log(logger, {"a": 2}, 2, folder)
    logger.close()
    wandb.teardown()
    os._exit(0)


@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_everything_is_written_when_other_processes_trained(tmp_path, launcher):
    trainer = stratagem.Trainer(
        **QUIET, devices=2, launcher=launcher, max_epochs=1, default_root_dir=tmp_path, logger=OFFLINE
    )
    trainer.fit(Described(), joined_batches(2, 8))

    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")  # at once: nothing here waits for wandb
    records = list(_records(path))
    assert [row["trainer/global_step"] for row in history(records)] == [1, 2]
    assert of_kind(records, "exit")[-1].exit_code == 0


SCRIPT = """
import stratagem
from stratagem_testing.reference import Net, joined_batches
trainer = stratagem.Trainer(
    max_epochs=1, accelerator="cpu", logger={"name": "wandb", "offline": True}, log_every_n_steps=1,
    enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(Net(), joined_batches(2, 8))
"""


def test_a_script_that_closes_nothing_finishes_its_run(tmp_path):
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True)

    (records,) = runs(tmp_path)
    assert [row["trainer/global_step"] for row in history(records)] == [1, 2]
    assert of_kind(records, "exit")[-1].exit_code == 0
    assert "Traceback" not in result.stderr


# --- Checkpoints -------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_uploaded(tmp_path):
    callback = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="train_loss", save_on_train_epoch_end=True)
    trainer = fit(
        tmp_path, logger=OFFLINE | {"log_model": True}, callbacks=[callback], enable_checkpointing=True, max_epochs=2
    )
    trainer.close()

    (records,) = runs(tmp_path)
    (artifact,) = of_kind(records, "artifact")
    best = callback.best_model_path
    assert (artifact.type, artifact.name) == ("model", f"model-{trainer.logger.run_id}")
    score = float(callback.best_model_score)
    assert json.loads(artifact.metadata) == {"path": best, "train_loss": pytest.approx(score)}
    (entry,) = artifact.manifest.contents
    assert (entry.path, entry.size) == (os.path.basename(best), os.path.getsize(best))


def test_all_checkpoints_are_uploaded(tmp_path):
    callback = ModelCheckpoint(
        dirpath=tmp_path / "kept", monitor="step", mode="max", save_on_train_epoch_end=True, filename="{epoch}"
    )
    trainer = fit(
        tmp_path, logger=OFFLINE | {"log_model": "all"}, callbacks=[callback], enable_checkpointing=True, max_epochs=2
    )
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    trainer.close()

    (records,) = runs(tmp_path)
    artifacts = of_kind(records, "artifact")
    names = [entry.path for artifact in artifacts for entry in artifact.manifest.contents]
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert [json.loads(artifact.metadata)["step"] for artifact in artifacts] == [3, 6]
    assert [set(artifact.aliases) for artifact in artifacts] == [{"latest", "best"}] * 2
    assert not (tmp_path / "kept" / "epoch=0.ckpt").exists()


def test_uploading_needs_a_callback_that_keeps_checkpoints(tmp_path):
    with pytest.raises(ConfigError, match=r"wandb.log_model is True and no callback saves checkpoints"):
        fit(tmp_path, logger=OFFLINE | {"log_model": True})


@pytest.mark.parametrize("value", ["best", 1])
def test_other_ways_to_upload_are_refused(value):
    with pytest.raises(ConfigError, match=rf"logger.wandb.log_model is {value!r}; expected"):
        stratagem.Trainer(logger={"name": "wandb", "log_model": value}, **QUIET)


# --- Errors -------------------------------------------------------------------------------------------------------


def test_an_id_that_is_in_use_is_named(tmp_path):
    first = WandbLogger(offline=True, id="mine")
    log(first, {"a": 1}, 1, tmp_path)
    with pytest.raises(ConfigError, match=r"could not start a run \(run ID mine is in use\).*change wandb.id"):
        log(WandbLogger(offline=True, id="mine"), {"a": 1}, 1, tmp_path)
    first.close()


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    said = run_in_processes(_fit_into, 2, tmp_path / "file" / "logs")

    assert all("wandb.save_dir is" in text and "is a file" in text and text.count("\n") == 0 for text in said), said


class Refuses(Net):
    def training_step(self, batch, batch_idx):
        raise AssertionError("training began")


def _fit_into(rank, size, folder):
    logger = WandbLogger(save_dir=folder, offline=True)
    trainer = stratagem.Trainer(**QUIET, devices=size, max_epochs=1, logger=logger)
    try:
        trainer.fit(Refuses(), share(trainer, joined_batches(1, 8)))
    except StratagemError as error:
        return str(error)
    return "nothing"


def test_a_folder_that_cannot_be_made_is_an_error_at_the_first_metric(tmp_path):
    logger = WandbLogger(save_dir="/proc", offline=True)
    with pytest.raises(ConfigError, match=r"wandb.save_dir is '/proc', which cannot be written"):
        log(logger, {"a": 1}, 1, tmp_path)
    logger.close()


def test_without_a_login_the_error_tells_how_to_log_in(tmp_path):
    with pytest.raises(ConfigError, match=r"wandb could not start a run .*wandb login.*wandb.offline"):
        fit(tmp_path, Described(), logger="wandb")


def test_without_the_package_the_error_tells_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(PluginError, match="pip install wandb"):
        fit(tmp_path)


def test_choosing_the_logger_does_not_import_wandb():
    code = (
        "import sys, stratagem as sg; sg.Trainer(logger='wandb', accelerator='cpu');"
        "print(sorted(name for name in sys.modules if 'wandb' in name))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "['stratagem_wandb']"


def test_the_last_lines_of_a_fit_name_the_folder_of_the_run(tmp_path):
    trainer = fit(tmp_path, logger=OFFLINE, max_epochs=1)
    folder = trainer.run.stack.written_files()["wandb"]
    trainer.close()

    assert Path(folder).is_dir()
    assert Path(folder).name.startswith("offline-run-")
