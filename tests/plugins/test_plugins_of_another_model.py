"""A plugin that was used in the fit of one model begins again with another one, and continues with the same one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import (
    EMA,
    AutoMicrobatch,
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Report,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from stratagem_testing import run_in_processes
from stratagem_testing.training import weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


class Model(sg.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.1)


def rows(samples=32):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


class EachStep(WeightAveraging):
    """As users write it: without attrs."""


class Thaws(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer)


class CountsSteps(sg.callbacks.Callback):
    """A user's own: stops after seven steps."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, module):
        self.steps += 1
        if self.steps == 7:
            trainer.should_stop = True

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class MakesItsStateInTheFit(sg.callbacks.Callback):
    """A user's own: `state_dict` fails before a fit."""

    def on_fit_start(self, trainer, module):
        self.steps = 0

    def on_train_batch_end(self, trainer, module):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}


#: Makes a callback, and says what is compared of its state.
CALLBACKS = {
    "ema": (lambda folder: EMA(decay=0.9), None),
    "weight averaging": (lambda folder: EachStep(), None),
    "swa": (lambda folder: StochasticWeightAveraging(0.01, 1), None),
    "early stopping": (lambda folder: EarlyStopping("loss", patience=2, min_delta=5.0), None),
    "model checkpoint": (
        lambda folder: ModelCheckpoint(folder, monitor="loss"), ("best_model_score", "last_step", "monitor"),
    ),
    "spike detection": (lambda folder: SpikeDetection(), None),
    "auto microbatch": (lambda folder: AutoMicrobatch(microbatches=2), None),
    "batch size finder": (lambda folder: BatchSizeFinder(max_trials=1, init_val=4), None),
    "backbone finetuning": (lambda folder: BackboneFinetuning(1), None),
    "finetuning": (lambda folder: Thaws(), None),
    "report": (lambda folder: Report(path=folder / "page.html"), ("steps", "batches")),
    "user's": (lambda folder: CountsSteps(), None),
    "user's, made in the fit": (lambda folder: MakesItsStateInTheFit(), None),
}  # fmt: skip


def fit(callback, model, trainer=None, **options):
    own = isinstance(callback, ModelCheckpoint | list)
    options = QUIET | {"max_epochs": 3, "callbacks": callback, "devices": 1, "enable_checkpointing": own} | options
    trainer = trainer or sg.Trainer(**options)
    trainer.fit(model, rows())
    return trainer


def assert_equal(found, right):
    if isinstance(right, dict):
        assert found.keys() == right.keys()
        found, right = list(found.values()), list(right.values())
    if isinstance(right, torch.Tensor):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    elif isinstance(right, list | tuple):
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            assert_equal(one, other)
    else:
        assert found == right


def outcome(trainer, callback, names):
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    state = callback.state_dict()
    return weights, {name: state[name] for name in names or state}, trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("same_trainer", [False, True], ids=["new trainer", "same trainer"])
@pytest.mark.parametrize("case", list(CALLBACKS))
def test_a_callback_begins_again_with_another_model(tmp_path, case, same_trainer):
    make, names = CALLBACKS[case]
    used, fresh = make(tmp_path / "used"), make(tmp_path / "fresh")
    first = fit(used, Model(1))
    if not same_trainer:
        first = None
        gc.collect()  # nor is the first model known any longer
    right = outcome(fit(fresh, Model(2)), fresh, names)
    found = outcome(fit(used, Model(2), first), used, names)

    assert_equal(found, right)


def test_what_has_no_number_to_compare_begins_again_too():
    timer, divides = Timer(duration=1000), AutoMicrobatch()
    trainer = fit([timer, divides], Model(1))
    timer._earlier["train"], divides.count = 2000.0, 8

    fit(None, Model(2), trainer)

    assert trainer.global_step == 12
    assert divides.count == 1


@pytest.mark.parametrize("make", [CALLBACKS["ema"][0], CALLBACKS["early stopping"][0], CALLBACKS["user's"][0]])
def test_a_second_fit_of_the_same_model_continues(tmp_path, make):
    used, model = make(tmp_path), Model(1)
    trainer = fit(used, model, max_epochs=1)
    before = used.state_dict()
    trainer.settings.max_epochs = 2
    trainer.fit(model, rows())

    after = used.state_dict()
    counts = [name for name in ("num_averaged", "wait_count", "steps") if name in before]
    assert all(after[name] > before[name] for name in counts)
    assert counts


def test_the_best_checkpoint_of_an_earlier_model_can_be_resumed(tmp_path):
    checkpoints, average = ModelCheckpoint(tmp_path, monitor="loss"), EMA(decay=0.9)
    fit([checkpoints, average], Model(1), max_epochs=2)
    again = Model(2)
    trainer = sg.Trainer(**QUIET, max_epochs=3, callbacks=[checkpoints, average])
    trainer.fit(again, rows(), ckpt_path="best")

    straight = EMA(decay=0.9)
    fit([ModelCheckpoint(tmp_path / "other"), straight], right := Model(1))
    torch.testing.assert_close(again.state_dict(), right.state_dict())
    assert average.num_averaged == straight.num_averaged == 12


def test_the_loss_scale_begins_again():
    precision = {"name": "16-mixed", "init_scale": 64.0, "growth_interval": 2}
    trainer = fit([], Model(1), precision=precision)
    scaler = trainer.run.stack.precision.plugin
    grown = scaler.state_dict()["scale"]
    fit([], Model(1), trainer)
    assert scaler.state_dict()["scale"] == grown > 64.0

    trainer.fit(trainer.model, rows())  # the same model: nothing is left to train
    assert scaler.state_dict()["scale"] == grown


def test_a_file_of_an_earlier_model_is_kept(tmp_path):
    class Fails(Model):
        def on_train_epoch_end(self):
            raise RuntimeError("failed")

    callback = OnExceptionCheckpoint(tmp_path)
    for seed in (1, 2):
        with pytest.raises(RuntimeError, match="failed"):
            fit(callback, Fails(seed))

    assert {each.name for each in tmp_path.glob("*.ckpt")} == {"on_exception.ckpt", "on_exception-v1.ckpt"}


def _folds(rank, world_size, strategy, launcher):
    average = EMA(decay=0.9)
    weights = []
    for seeds in ((1, 2), (2,)):
        average = average if seeds == (1, 2) else EMA(decay=0.9)
        for seed in seeds:
            trainer = sg.Trainer(**QUIET, max_epochs=2, devices=2, strategy=strategy, callbacks=average)
            trainer.fit(Model(seed), rows())
            weights.append(weights_of(trainer))
    return weights[1:]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_folds_on_two_ranks(strategy):
    for found, right in run_in_processes(_folds, 2, strategy, None):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.slow
def test_folds_in_launched_processes():
    average, weights = EMA(decay=0.9), []
    for seed in (1, 2):
        model = Model(seed)
        fit(average, model, devices=2, launcher="fork", strategy="ddp")
        weights.append(model.state_dict())
    fit(EMA(decay=0.9), right := Model(2), devices=2, launcher="fork", strategy="ddp")

    assert average.num_averaged == 6
    torch.testing.assert_close(weights[1], right.state_dict(), rtol=0, atol=0)


class BeginsOnce(sg.callbacks.Callback):
    """Has no state before its first fit, and keeps what it finds in a later one."""

    def on_fit_start(self):
        if not hasattr(self, "count"):
            self.count = 0

    def on_train_batch_end(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_what_a_first_fit_made_is_removed():
    callback, counts = BeginsOnce(), []
    for model in (Model(1), Model(2)):
        for _ in range(2):
            fit(callback, model)
            counts.append(callback.count)

    assert counts == [counts[0], 2 * counts[0]] * 2
