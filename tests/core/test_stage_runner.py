"""From a call of the user to loaders, limits and the model's mode."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.events import Events
from stratagem_trainer.request import StageRequest
from stratagem_trainer.stage_runner import StageRunner, _validation_interval

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


FIRST, SECOND = DataLoader([1, 2]), DataLoader([3, 4])


class WithLoaders(Net):
    def train_dataloader(self):
        return ["the module's"]

    def val_dataloader(self):
        return [FIRST, SECOND]


class Data(sg.DataModule):
    def train_dataloader(self):
        return ["the data module's"]


@pytest.fixture
def runner(tmp_path):
    """Make the runner of a request, in a trainer that has not trained."""
    trainers = []

    def make(stage="fit", module=None, request=None, **arguments):
        trainer = sg.Trainer(**QUIET | {"default_root_dir": tmp_path} | arguments)
        trainers.append(trainer)
        trainer.run.connect()
        state = trainer._state
        state.module = module or Net()
        state.module.__dict__["_fit"] = state
        state.begin(Events(state))
        return StageRunner(state, StageRequest(stage, **request or {}))

    yield make
    for trainer in trainers:
        trainer.close()


# --- How many batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 8), (1.0, 8), (1, 1), (0, 0), (0.0, 0), (0.5, 4), (0.99, 7), (5, 5), (20, 8)]
)
def test_a_limit_is_a_number_or_a_share(runner, limit, expected):
    assert runner(limit_train_batches=limit).loaders.limited("limit_train_batches", range(8)) == expected


def test_a_stream_is_limited_by_a_number_only(runner):
    stream = DataLoader(Stream())

    for limit, expected in ((None, math.inf), (1.0, math.inf), (2, 2)):
        assert runner(limit_train_batches=limit).loaders.limited("limit_train_batches", stream) == expected
    with pytest.raises(ConfigError, match=r"limit_val_batches is 0.5 and the loader has no length"):
        runner(limit_val_batches=0.5).loaders.limited("limit_val_batches", stream)


def test_a_share_of_less_than_a_batch_is_refused(runner):
    with pytest.raises(ConfigError, match=r"limit_train_batches is 0.1, and the loader has 8 batches: none of them"):
        runner(limit_train_batches=0.1).loaders.limited("limit_train_batches", range(8))


@pytest.mark.parametrize(("train", "val"), [(8, 2), (2, 8)])
def test_a_share_to_overfit_is_named(train, val):
    loaders = [joined_batches(size, 4) for size in (train, val)]
    with pytest.raises(ConfigError, match=r"overfit_batches is 0.2, and the loader has 2 batches: none of them"):
        sg.Trainer(overfit_batches=0.2, **QUIET).fit(Net(), *loaders)


def test_a_fast_run_overrides_the_limit(runner):
    assert runner(fast_dev_run=3, limit_train_batches=0.5).loaders.limited("limit_train_batches", range(8)) == 3


@pytest.mark.parametrize(
    ("interval", "size", "expected"),
    [(1.0, 8, 8), (0.25, 8, 2), (0.01, 8, 1), (3, 8, 3), (8, 8, 8), (1.0, math.inf, math.inf), (3, math.inf, 3)],
)
def test_batches_between_two_validations(interval, size, expected):
    assert _validation_interval(interval, size) == expected


@pytest.mark.parametrize(
    ("interval", "size", "message"),
    [
        (0, 8, "val_check_interval is 0; expected at least one batch"),
        (0.5, math.inf, "has no length; expected a whole number of batches"),
        (9, 8, "val_check_interval is 9 and an epoch has 8 batches; expected at most that many"),
    ],
)
def test_an_interval_that_never_comes_is_refused(interval, size, message):
    with pytest.raises(ConfigError) as refused:
        _validation_interval(interval, size)

    assert message in str(refused.value)


# --- Which loaders -----------------------------------------------------------------------------------------------


def test_loaders_that_are_passed_come_before_those_of_data_and_module(runner):
    module = WithLoaders()

    assert runner(module=module, request={"loaders": ["passed"], "datamodule": Data()}).loaders.given() == [["passed"]]
    assert runner(module=module, request={"datamodule": Data()}).loaders.given() == [["the data module's"]]
    assert runner(module=module).loaders.given() == [["the module's"]]


def test_a_data_module_without_a_method_leaves_it_to_the_module(runner):
    made = runner("validate", WithLoaders(), {"datamodule": Data()})

    assert made.loaders.given() == [FIRST, SECOND]


def test_a_list_of_batches_is_one_loader(runner):
    assert runner("validate", request={"loaders": [[1], [2]]}).loaders.given() == [[[1], [2]]]
    assert runner(request={"loaders": [[1], [2]]}).loaders.given() == [[[1], [2]]]


@pytest.mark.parametrize(
    ("stage", "request_", "message"),
    [
        ("fit", {}, "fit got no loader; expected a DataLoader, a datamodule, or a module with train_dataloader"),
        ("test", {}, "test got no loader"),
    ],
)
def test_a_call_without_its_loader_is_refused(runner, stage, request_, message):
    with pytest.raises(ConfigError) as refused:
        runner(stage, request=request_).loaders.given()

    assert message in str(refused.value)


def test_validation_loaders_need_a_step(runner):
    class NoValidation(sg.Module):
        pass

    with pytest.raises(ConfigError, match="NoValidation has no validation_step"):
        runner(module=NoValidation(), request={"val_loaders": [[1]]}).loaders.validation()
    assert runner(request={"val_loaders": [[1]]}, limit_val_batches=0).loaders.validation() == []
    assert runner().loaders.validation() == []
    assert len(runner(module=WithLoaders()).loaders.validation()) == 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            {"a": [1]},
            "one of several train loaders is a dict of loaders; expected a loader; put a CombinedLoader there",
        ),
        (3, "the train loader is a int; expected"),
    ],
    ids=["mapping", "number"],
)
def test_what_is_not_a_loader_is_refused(runner, loader, message):
    with pytest.raises(ConfigError) as refused:
        runner().loaders.share(loader, "train")

    assert message in str(refused.value)


def test_overfitting_reads_in_order(runner):
    loader = DataLoader(TensorDataset(torch.arange(64)), shuffle=True)
    shared = runner(overfit_batches=4).loaders.share(loader, "train")

    assert [int(batch[0]) for batch in shared] == list(range(64))


# --- The call ----------------------------------------------------------------------------------------------------


def test_what_ranks_compare_of_a_call(runner):
    facts = runner("test", request={"datamodule": Data(), "ckpt_path": "best"})._facts()

    assert facts == {
        "the call": "test", "the module": "Net", "ckpt_path": "best", "dataloaders": False, "val_dataloaders": False,
        "datamodule": "Data",
    }  # fmt: skip


def test_hyperparameters_of_data_and_module_are_one_mapping(runner):
    class Model(Net):
        def __init__(self, width=3, rate=0.1):
            super().__init__()
            self.save_hyperparameters()

    class Sized(sg.DataModule):
        def __init__(self, width=3, samples=7):
            super().__init__()
            self.save_hyperparameters()

    assert runner(module=Model(), request={"datamodule": Sized()})._hyperparameters() == {
        "width": 3, "rate": 0.1, "samples": 7,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="hyper-parameter 'width' is 3 in Model and 4 in Sized"):
        runner(module=Model(), request={"datamodule": Sized(4)})._hyperparameters()


def test_a_sanity_check_leaves_random_numbers_and_metrics_as_they_were(runner):
    made = runner(num_sanity_val_steps=1)
    made.run.prepare(made.module, lambda: [made.module.configure_optimizers()])
    made.val_loaders, made.state.num_val_batches = [joined_batches(2, 4)], [2]
    torch.manual_seed(4)
    before = torch.get_rng_state()
    made._sanity_check()

    assert torch.equal(torch.get_rng_state(), before)
    assert made.state.published.exact == {}
    assert made.state.sanity_checking is False
