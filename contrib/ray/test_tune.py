"""`ray_tune` reports to trials of a real Ray Tune; failed trials are resumed to the bit, bad ones are stopped early."""

import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
import torch
from ray import tune
from stratagem_ray.tune import RayTune, resume_path

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import CallbackConformance
from stratagem_testing.reference import Dropped, Net, joined_batches
from stratagem_testing.training import QUIET, outcome


class _Context:
    @staticmethod
    def get_trial_id():
        return "trial"


class _Trial:
    """Stands for Ray Tune in processes without a trial: the kit looks at what a callback does to training."""

    get_context = _Context
    Checkpoint = tune.Checkpoint

    @staticmethod
    def report(metrics, checkpoint=None):
        assert all(isinstance(value, float) for value in metrics.values())


class TestRayTune(CallbackConformance):
    plugin: ClassVar[Any] = {"name": "ray_tune", "metrics": "val_loss"}

    @pytest.fixture(autouse=True)
    def _in_a_trial(self, monkeypatch):
        monkeypatch.setattr("stratagem_ray.tune._tune", lambda: _Trial)


def fit(callback, module=None, ckpt_path=None, validates=True, **others):
    batches = joined_batches(3, 8)
    arguments = QUIET | {"accelerator": "cpu", "callbacks": [callback], "max_epochs": 4} | others
    trainer = sg.Trainer(**arguments)
    trainer.fit(module or Net(), batches, batches if validates else None, ckpt_path=ckpt_path)
    return trainer


# --- Outside a trial ---------------------------------------------------------------------------------------------


def test_outside_a_trial_it_says_what_to_do():
    with pytest.raises(ConfigError, match="this process runs no trial of Ray Tune; expected fit to be called in the"):
        fit("ray_tune")
    with pytest.raises(ConfigError, match="runs no trial of Ray Tune"):
        resume_path()


def test_without_fit_no_trial_is_needed():
    sg.Trainer(**QUIET, accelerator="cpu", callbacks=["ray_tune"]).validate(Net(), joined_batches(1, 8))


@pytest.mark.parametrize("value", [0, -1, "yes", None])
def test_options_are_checked(value):
    with pytest.raises(ConfigError, match="save_checkpoints is"):
        RayTune(save_checkpoints=value)


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ([], r"metrics is \[\]; expected names of metrics"),
        ({}, "metrics is {}; expected names"),
        ("", "metrics is ''; expected names"),
        (["val_loss", "done"], "metrics reports 'done', a name that Ray Tune uses itself"),
        ({"training_iteration": "val_loss"}, "metrics reports 'training_iteration', a name that"),
    ],
)
def test_metrics_that_report_nothing_or_replace_rays_own_are_refused(metrics, told):
    with pytest.raises(ConfigError, match=f"callbacks.ray_tune.{told}"):
        RayTune(metrics=metrics)


# --- Trials ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(network):
    """A function that runs trials in a Ray of this machine, and returns their results."""
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, logging_level="warning")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def run(objective, space, scheduler=None, failures=0):
        tuner = tune.Tuner(
            tune.with_resources(objective, {"cpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=1),
            run_config=tune.RunConfig(
                storage_path=str(network / "results"), verbose=0,
                failure_config=tune.FailureConfig(max_failures=failures),
            ),
        )  # fmt: skip
        return {result.config["case"]: result for result in tuner.fit()}

    yield run
    ray.shutdown()


def _values(result, name):
    return [row[name] for row in result.metrics_dataframe.to_dict("records")]


class _Fails(Dropped):
    """Fails in its third epoch, unless it is resumed."""

    how, resumed = "", False

    def on_train_epoch_end(self):
        self.losses = [*getattr(self, "losses", []), float(self.trainer.callback_metrics["val_loss"])]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["losses"] = list(getattr(self, "losses", []))  # that of this epoch follows, also in a resumed run

    def on_load_checkpoint(self, checkpoint):
        self.losses = checkpoint["losses"]

    def on_train_epoch_start(self):
        if not self.resumed and self.trainer.current_epoch == 2:
            if self.how == "killed":
                time.sleep(2)  # until Tune has noted the last report: it would be repeated
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "an error":
                raise RuntimeError("broken")


def _resumes(config):
    path = resume_path()
    sg.seed_everything(1)
    module = _Fails()
    module.how, module.resumed = config["case"], path is not None
    fit(RayTune(metrics={"loss": "val_loss"}, save_checkpoints=config["every"]), module, path)
    torch.save((module.state_dict(), module.losses), Path(config["folder"]) / config["case"])


@pytest.mark.parametrize("every", [True, 2])
def test_a_trial_that_failed_is_resumed_to_the_bit(tuned, tmp_path, every):
    """Each epoch is trained and reported once, and the weights are those of a trial that did not fail."""
    cases = ["whole", "an error", "killed"]
    space = {"case": tune.grid_search(cases), "folder": str(tmp_path), "every": every}

    results = tuned(_resumes, space, failures=1)

    assert {case: result.error for case, result in results.items()} == dict.fromkeys(cases)
    whole, losses = torch.load(tmp_path / "whole")
    assert len(losses) == 4
    for case in cases:
        weights, own = torch.load(tmp_path / case)
        assert own == losses
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights.items())
        last = results[case].metrics
        assert (last["training_iteration"], last["loss"]) == (4, pytest.approx(losses[-1]))


class _Logs(Net):
    """Logs one metric of this name, or none."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        if self.name:
            self.log(self.name, 1.0)


def _reports(config):
    case = config["case"]
    if case == "all metrics":
        fit("ray_tune", max_epochs=2)
    elif case == "a list":
        fit(RayTune(metrics=["val_loss", "train_loss"]), max_epochs=2)
    elif case == "without validation":
        fit(RayTune(metrics="train_loss"), validates=False, max_epochs=2)
    elif case == "a trial run":
        fit(RayTune(), fast_dev_run=True)
        tune.report({"nothing": 1})
    else:
        said = {
            "a wrong name": lambda: fit(RayTune(metrics={"loss": "val_los"})),
            "no metric": lambda: fit(RayTune(), _Logs("")),
            "a name of Ray's": lambda: fit(RayTune(), _Logs("done")),
            "a late name": lambda: fit(RayTune(metrics=["val_loss", "train_los"])),
            "processes": lambda: fit(RayTune(), strategy="ddp_spawn", devices=2),
            "a new trial": lambda: print(resume_path() is None or 1 / 0),
        }
        tune.report({"said": outcome(said[case])})


def test_what_trials_report_and_refuse(tuned):
    cases = [
        "all metrics", "a list", "without validation", "a trial run", "a wrong name", "a late name", "processes",
        "a new trial", "no metric", "a name of Ray's",
    ]  # fmt: skip
    results = tuned(_reports, {"case": tune.grid_search(cases)})

    assert {case: result.error for case, result in results.items()} == dict.fromkeys(cases)
    assert len(_values(results["all metrics"], "val_loss")) == 2
    assert "train_loss" in results["all metrics"].metrics
    assert len(_values(results["a list"], "train_loss")) == 2
    assert len(_values(results["without validation"], "train_loss")) == 2
    assert _values(results["a trial run"], "nothing") == [1]
    said = {case: result.metrics.get("said", "") for case, result in results.items()}
    assert (
        "'val_los', which nobody logged in validation; expected one of val_loss; did you mean 'val_loss'"
        in said["a wrong name"]
    )
    assert "'train_los', which nobody logged" in said["a late name"]
    assert (
        "callbacks.ray_tune reports from the trial's process, and the launcher would start 2 others"
        in (said["processes"])
    )
    assert said["a new trial"] == "nothing"
    assert "reports all metrics that are logged, and there are none; expected at least one" in said["no metric"]
    assert "and 'done' is a name that Ray Tune uses itself" in said["a name of Ray's"]


# --- A search ----------------------------------------------------------------------------------------------------

#: Beside this file where the wheel is tested, else in the repository.
DIGITS = next(
    path
    for path in (Path(__file__).with_name("digits.py"), Path(__file__).parents[2] / "examples" / "digits.py")
    if path.exists()
)


def _search(config):
    spec = importlib.util.spec_from_file_location("digits", config["example"])
    digits = sys.modules["digits"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    sg.seed_everything(1)
    callback = RayTune(metrics="val_loss")
    trainer = sg.Trainer(**QUIET | {"accelerator": "cpu", "callbacks": [callback], "max_epochs": 4})
    trainer.fit(digits.Digits(width=8, lr=config["case"]), datamodule=digits.DigitsData())


def test_a_search_on_digits_ends_bad_trials_early(tuned):
    rates = [1e-2, 3e-3, 1e-6, 1e-7]
    scheduler = tune.schedulers.ASHAScheduler(
        metric="val_loss", mode="min", grace_period=1, max_t=4, reduction_factor=2
    )

    results = tuned(_search, {"case": tune.grid_search(rates), "example": str(DIGITS)}, scheduler)

    reports = {rate: len(_values(result, "val_loss")) for rate, result in results.items()}
    assert {rate: result.error for rate, result in results.items()} == dict.fromkeys(rates)
    assert reports[1e-2] == 4
    assert (reports[1e-6], reports[1e-7]) == (1, 1)
    best = min(results.values(), key=lambda result: result.metrics["val_loss"])
    assert best.config["case"] in (1e-2, 3e-3)


# --- The guide ---------------------------------------------------------------------------------------------------


class Rated(Net):
    def __init__(self, lr):
        super().__init__(lr=lr)


def test_the_search_of_the_guide_finds_a_rate(tuned, tmp_path, monkeypatch, capsys):
    """`tuned` has started Ray."""
    page = Path(__file__).parents[2] / "docs" / "hyper-parameter-search.md"
    if not page.exists():
        pytest.skip("the page is in the repository only")
    (source,) = [each for each in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S) if "ray" in each]
    monkeypatch.chdir(tmp_path)
    place = f"run_config=tune.RunConfig(storage_path={str(tmp_path / 'results')!r}, "
    names: dict[str, Any] = {"sg": sg, "Model": Rated, "batches": joined_batches(4, 8)}
    exec(source.replace("run_config=tune.RunConfig(", place), names)

    best = capsys.readouterr().out.splitlines()[-1]
    assert 1e-4 <= float(re.fullmatch(r"\{'lr': (\S+)\}", best)[1]) <= 1.0
    assert len(list((tmp_path / "results").glob("*/*/result.json"))) == 4
