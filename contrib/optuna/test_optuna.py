"""`optuna_pruning` reports after each validation, and raises TrialPruned on all ranks; a search ends bad trials."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
from stratagem_optuna import OptunaPruning

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import CallbackConformance, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import QUIET, outcome

optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(**options):
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    return optuna.create_study(
        direction="minimize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0), **options
    )


def trial_after(*values):
    """Return a trial of a study in which an earlier one reported `values`."""
    study = study_of()
    first = study.ask()
    for step, value in enumerate(values):
        first.report(value, step)
    study.tell(first, values[-1])
    return study.ask()


class Ignored(optuna.trial.FixedTrial):
    """A trial that is never pruned."""

    def __eq__(self, other):
        return type(self) is type(other)

    __hash__ = None


class TestOptunaPruning(CallbackConformance):
    plugin: ClassVar[Any] = {"name": "optuna_pruning", "trial": Ignored({}), "monitor": "val_loss"}


def arguments_of(callback, size=1, **others):
    return QUIET | {"accelerator": "cpu", "devices": size, "callbacks": [callback], "max_epochs": 5} | others


def fit(callback, size=1, **others):
    batches = joined_batches(4, 8)
    trainer = sg.Trainer(**arguments_of(callback, size, **others))
    trainer.fit(Net(), batches, batches)
    return trainer


def chosen(trial, monitor="val_loss"):
    return {"name": "optuna_pruning", "trial": trial, "monitor": monitor}


def intermediate(trial):
    return trial.study.trials[trial.number].intermediate_values


def test_a_good_trial_reports_each_validation():
    trial = trial_after(1e9, 1e9, 1e9, 1e9, 1e9)
    trainer = fit(chosen(trial))

    values = intermediate(trial)
    assert list(values) == [0, 1, 2, 3, 4]
    assert values[4] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_a_bad_trial_is_pruned():
    trial = trial_after(1e9, 1e-9, 1e-9)
    with pytest.raises(optuna.TrialPruned, match=r"trial 1 was pruned after report 1: val_loss is \d"):
        fit(chosen(trial))

    assert list(intermediate(trial)) == [0, 1]


def test_the_sanity_check_and_a_trial_run_report_nothing():
    trial = trial_after(1e-9)
    fit(chosen(trial), fast_dev_run=True)

    assert not intermediate(trial)


def pruned_on(rank, size):
    trial = trial_after(*[1e-9 if rank == 0 else 1e9] * 5)  # another one on the second rank, as in a script
    return outcome(lambda: fit(chosen(trial), size, strategy="ddp"))


def test_all_ranks_raise():
    outcomes = run_in_processes(pruned_on, 2)

    assert all(each.startswith("TrialPruned: trial") for each in outcomes), outcomes


def wrong_on(rank, size, how):
    trial = trial_after(1.0)
    if how == "none":
        trial = None
    if how == "multi" and rank == 0:
        trial = optuna.create_study(directions=["minimize"] * 2).ask()
    return outcome(lambda: fit(chosen(trial, "val_los" if how == "monitor" else "val_loss"), size, strategy="ddp"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("none", "callbacks.optuna_pruning.trial is NoneType on rank 0"),
        ("monitor", "which nobody logged; expected one of val_loss; did you mean 'val_loss'"),
        ("multi", "multi-objective"),
    ],
)  # fmt: skip
def test_mistakes_are_raised_on_all_ranks(how, message):
    outcomes = run_in_processes(wrong_on, 2, how)

    assert all(message in each for each in outcomes), outcomes


def test_a_wrong_name_is_refused_before_the_first_step():
    class Counts(Net):
        steps = 0

        def training_step(self, batch, batch_idx):
            Counts.steps += 1
            return super().training_step(batch, batch_idx)

    batches = joined_batches(2, 8)
    with pytest.raises(ConfigError, match="did you mean 'val_loss'"):
        sg.Trainer(**arguments_of(chosen(trial_after(1.0), "val_los"))).fit(Counts(), batches, batches)
    assert Counts.steps == 0


def test_a_fit_without_validation_reports_each_epoch():
    trial = trial_after(*[1e9] * 5)
    sg.Trainer(**arguments_of(chosen(trial, "train_loss"), max_epochs=3)).fit(Net(), joined_batches(2, 8))

    assert list(intermediate(trial)) == [0, 1, 2]


@pytest.mark.parametrize("option", [{"monitor": ""}, {"monitr": "val_loss"}, {}])
def test_options_are_checked(option):
    with pytest.raises(ConfigError, match=r"monitor|monitr"):
        sg.Trainer(**arguments_of({"name": "optuna_pruning", "trial": trial_after(1.0)} | option))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("good", [False, True])
def test_what_workers_reported_comes_back(stored, good, tmp_path):
    """In memory, where workers have a copy of the study, and in a file."""
    study, values = study_of(storage=f"sqlite:///{tmp_path}/study.db" if stored else None), [1e9] * 5
    first = study.ask()
    for step, value in enumerate(values if good else [1e9, 1e-9]):
        first.report(value, step)
    study.tell(first, 1.0)
    trial = study.ask()
    callback = OptunaPruning(trial=trial, monitor="val_loss")
    fit(callback, 2, strategy="ddp_fork")
    told = outcome(callback.check_pruned)

    assert list(intermediate(trial)) == ([0, 1, 2, 3, 4] if good else [0, 1])
    assert told == "nothing" if good else told.startswith("TrialPruned: trial 1 was pruned after report 1")


def test_a_resumed_trial_continues_its_numbers(tmp_path):
    trial = trial_after(*[1e9] * 9)
    trainer = fit(chosen(trial), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, batches = trial_after(*[1e9] * 9), joined_batches(4, 8)
    sg.Trainer(**arguments_of(chosen(again), max_epochs=3)).fit(Net(), batches, batches, ckpt_path=tmp_path / "a.ckpt")

    assert list(intermediate(again)) == [0, 1, 2]
    assert intermediate(again)[1] == intermediate(trial)[1]


# --- A search ----------------------------------------------------------------------------------------------------


@pytest.fixture
def digits():
    path = Path(__file__).parents[2] / "examples" / "digits.py"
    if not path.exists():
        pytest.skip("the example is in the repository only")
    spec = importlib.util.spec_from_file_location("digits", path)
    module = sys.modules["digits"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("digits")


def test_a_search_on_digits_ends_bad_trials_early(digits):
    """Learning rates from good to useless; trials after the first are compared with the median of those before."""
    study, ended = study_of(), {}
    for lr in (3e-3, 1e-2, 1e-6, 1e-7):
        study.enqueue_trial({"lr": lr})

    def objective(trial):
        sg.seed_everything(1)
        callback = chosen(trial)
        trainer = sg.Trainer(**arguments_of(callback, max_epochs=4))
        model = digits.Digits(width=8, lr=trial.suggest_float("lr", 1e-7, 1e-1, log=True))
        try:
            trainer.fit(model, datamodule=digits.DigitsData())
        finally:
            ended[trial.number] = trainer.current_epoch
        return float(trainer.callback_metrics["val_loss"])

    study.optimize(objective, n_trials=4)

    states = [trial.state.name for trial in study.trials]
    assert states[0] == "COMPLETE"
    assert states[2:] == ["PRUNED", "PRUNED"]
    assert [len(trial.intermediate_values) for trial in study.trials[2:]] == [1, 1]
    assert study.best_params["lr"] in (3e-3, 1e-2)
    assert study.best_value < 1.0


class Rated(Net):
    def __init__(self, lr):
        super().__init__(lr=lr)


def test_the_search_of_the_guide_prunes_and_finds_a_rate(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "hyper-parameter-search.md"
    if not page.exists():
        pytest.skip("the page is in the repository only")
    (source,) = [each for each in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S) if "optuna" in each]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"sg": sg, "Model": Rated, "batches": joined_batches(4, 8)}
    exec(source, names)

    trials = names["study"].trials
    assert len(trials) == 6
    assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}
    assert names["study"].best_params["lr"] > 0


def test_an_instance_that_served_an_earlier_trial_starts_again():
    study = study_of()
    first, second = study.ask(), study.ask()
    callback = OptunaPruning(trial=first, monitor="val_loss")
    fit(callback)
    callback.trial = second
    fit(callback)

    assert list(intermediate(second)) == [0, 1, 2, 3, 4] == list(intermediate(first))
