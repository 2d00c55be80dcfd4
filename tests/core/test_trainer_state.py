"""The state of a fit as one dictionary: what is in it, what is refused, and where a checkpoint is found."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.checkpoint.state_checks import check_weights_fit
from stratagem.errors import CheckpointError, ConfigError
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer import trainer_state

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


class Scheduled(Net):
    """A model with a schedule and a buffer."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    """The state of a fit that ended within its second epoch, and is still open."""
    trainer = sg.Trainer(
        **QUIET, max_steps=3, default_root_dir=tmp_path_factory.mktemp("fit"), enable_checkpointing=False,
        callbacks=EarlyStopping(monitor="train_loss", patience=7, check_on_train_epoch_end=True),
    )  # fmt: skip
    trainer.fit(Scheduled(), joined_batches(2, 8))
    yield trainer._state
    trainer.close()


@pytest.fixture
def state(fit):
    """What a checkpoint of `fit` holds; the fit is as it was afterwards."""
    saved = copy.deepcopy(trainer_state.dump(fit))
    yield copy.deepcopy(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_state.restore(fit, saved)


# --- What is saved -----------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_documented_keys(state):
    assert set(state) == {
        "state_dict", "optimizers", "lr_schedulers", "loop", "ranks", "callbacks", "plugins", "hyper_parameters",
        "format",
    }  # fmt: skip
    assert state["loop"]["global_step"] == 3
    assert (state["loop"]["epoch"], state["loop"]["batches_done"]) == (1, 1)
    assert len(state["ranks"]) == 1
    assert set(state["optimizers"][0]["state"]) == {name for name, _ in Scheduled().named_parameters()}
    assert all(key.startswith("callback.") for key in state["callbacks"])


def test_weights_alone_have_neither_optimizers_nor_progress(fit):
    assert set(trainer_state.dump(fit, weights_only=True)) == {"state_dict", "format", "hyper_parameters"}


def test_only_ranks_other_than_0_save_their_buffers(fit):
    assert trainer_state._of_this_rank(fit)["buffers"] == {}


# --- What is restored --------------------------------------------------------------------------------------------


def test_restoring_returns_to_the_saved_weights_optimizers_and_progress(fit, state):
    with torch.no_grad():
        for parameter in fit.module.parameters():
            parameter.add_(1)
    fit.run.optimizers[0].param_groups[0]["lr"] = 7.0
    fit.position.global_step, fit.position.batches_done = 90, 0
    trainer_state.restore(fit, dict(state))

    for name, parameter in fit.module.named_parameters():
        assert torch.equal(parameter, state["state_dict"][name]), name
    assert fit.run.optimizers[0].param_groups[0]["lr"] == state["optimizers"][0]["param_groups"][0]["lr"] != 7.0
    assert (fit.position.global_step, fit.position.batches_done) == (3, 1)
    assert fit.module.seen == 3


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (("format", "loop", "optimizers", "lr_schedulers", "ranks"), "was not written by stratagem"),
        (("optimizers",), "no optimizer comes with the checkpoint"),
    ],
)
def test_weights_of_other_checkpoints_start_at_step_0(fit, state, drop, message):
    weights = {name: value + 1 for name, value in state["state_dict"].items()}
    others = {key: value for key, value in state.items() if key not in drop}
    fit.position.global_step = 0
    with pytest.warns(UserWarning, match=message):
        trainer_state.restore(fit, others | {"state_dict": weights})

    assert torch.equal(fit.module.state_dict()["net.0.weight"], weights["net.0.weight"])
    assert fit.position.global_step == 0


def without(key, *path):
    def change(state):
        part = state
        for each in path:
            part = part[each]
        del part[key]

    return change


def with_value(value, *path):
    def change(state):
        part = state
        for each in path[:-1]:
            part = part[each]
        part[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("loop"), "has no 'loop'"),
        (without("ranks"), "has no 'ranks'"),
        (without("callbacks"), "has no 'callbacks'"),
        (without("lr_schedulers"), "has no 'lr_schedulers'"),
        (without("epoch", "loop"), "loop has no 'epoch'"),
        (with_value(-1, "loop", "global_step"), "loop.global_step is -1; expected a whole number, 0 or more"),
        (with_value([], "ranks"), "ranks is empty"),
        (without("random", "ranks", 0), "ranks[0] has no 'random'"),
        (with_value({"torch": "x"}, "ranks", 0, "random"), "ranks[0].random cannot be applied"),
        (with_value("high", "ranks", 0, "callback_metrics", "train_loss"), "callback_metrics['train_loss'] is a str"),
        (with_value({"marks": 3}, "ranks", 0, "feed"), "ranks[0].feed"),
        (with_value([], "lr_schedulers"), "holds 0 scheduler states; expected 1 as in this run"),
        (with_value(torch.zeros(2), "state_dict", "net.0.weight"), "net.0.weight"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_changed(fit, state, change, message):
    before = {name: value.clone() for name, value in fit.module.state_dict().items()}
    random = torch.get_rng_state()
    damaged = copy.deepcopy(state)
    damaged["ranks"][0]["feed"] = {}
    change(damaged)
    with pytest.raises(CheckpointError) as refused:
        trainer_state.restore(fit, damaged, "a.ckpt")

    assert message in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in fit.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert fit.position.global_step == 3


@pytest.mark.parametrize(("ranks", "done", "expected"), [(2, 5, 10), (4, 3, 12), (3, 1, 3)])
def test_another_number_of_processes_continues_after_as_many_samples(fit, state, ranks, done, expected):
    state["loop"] |= {"batches_done": done, "epoch_done": False}
    state["ranks"][0]["feed"] = {}
    state["ranks"] = [rank | {"mesh": {"data": ranks}} for rank in state["ranks"] * ranks]
    with pytest.warns(UserWarning, match=f"random states of {ranks} processes and this run has 1"):
        trainer_state.restore(fit, state)

    assert fit.position.batches_done == expected


def test_an_open_window_of_other_processes_begins_again(fit, state):
    state["loop"] |= {"batches_done": 3, "epoch_done": False}
    state["ranks"][0]["feed"] = {"marks": {}, "accumulate": 2, "window": {"start": 2, "buffers": {}}}
    state["ranks"] = [rank | {"mesh": {"data": 2}} for rank in state["ranks"] * 2]
    with pytest.warns(UserWarning, match="random states of 2 processes"):
        trainer_state.restore(fit, state)

    assert fit.position.batches_done == 4


# --- Workers -----------------------------------------------------------------------------------------------------


def test_a_result_of_a_worker_has_all_that_the_parent_resumes_from(fit, state):
    packed = trainer_state.WorkerResult.pack(fit, "result", fitted=True)
    kept = dict(fit.__dict__)
    try:
        assert packed.unpack(fit) == "result"
        assert set(fit.worker_state) == set(trainer_state._OF_WORKER)
        assert fit.position.global_step == 3
        assert fit.position.epoch_random_state is None
    finally:
        fit.__dict__.update(kept)
    assert "optimizers" not in trainer_state.WorkerResult.pack(fit, None, fitted=False).state


# --- Finding a checkpoint ----------------------------------------------------------------------------------------


@pytest.fixture
def trainer(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = sg.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path, callbacks=ModelCheckpoint())
        trainer.fit(Net(), joined_batches(1, 8))
    yield trainer
    trainer.close()


def test_a_path_is_taken_as_it_is_and_none_is_a_fresh_start(fit, tmp_path):
    assert trainer_state.find(fit, None) is None
    assert trainer_state.find(fit, tmp_path / "no such.ckpt") == tmp_path / "no such.ckpt"


def test_last_is_the_newest_and_best_that_of_the_callback(trainer):
    best = trainer.checkpoint_callback.best_model_path
    later = Path(trainer.default_root_dir, "later.ckpt")
    trainer.save_checkpoint(later)

    assert str(trainer_state.find(trainer._state, "best")) == str(best)
    assert trainer_state.find(trainer._state, "last") == later


def test_without_a_checkpoint_last_and_best_are_refused(fit):
    with pytest.raises(CheckpointError, match='ckpt_path is "last"; expected a whole checkpoint in'):
        trainer_state.find(fit, "last")
    with pytest.raises(CheckpointError, match='ckpt_path is "best"; expected a callback that has saved a best'):
        trainer_state.find(fit, "best")


def test_after_close_there_is_no_optimizer_to_save(trainer):
    trainer.close()

    with pytest.raises(ConfigError, match=r"save_checkpoint was called after close\(\)"):
        trainer_state.dump(trainer._state)
    assert "state_dict" in trainer_state.dump(trainer._state, weights_only=True)


# --- Weights in another form -------------------------------------------------------------------------------------


class Packed(torch.nn.Module):
    """Holds its weight as integers of another shape; in a state it is floating point."""

    loads_converted = ("weight",)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)


def test_what_a_part_converts_is_not_checked_before():
    model = torch.nn.ModuleDict({"packed": Packed(), "plain": torch.nn.Linear(2, 2)})
    weights = {"packed.weight": torch.zeros(2, 4), "plain.bias": torch.zeros(2)}
    check_weights_fit(weights, model)

    with pytest.raises(CheckpointError, match=r"'plain.bias'.* has dtype torch.int64"):
        check_weights_fit(weights | {"plain.bias": torch.zeros(2, dtype=torch.long)}, model)
