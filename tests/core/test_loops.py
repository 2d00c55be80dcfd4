"""What the training loop does with steps, modes and calls that are not as they should be."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Lbfgs, Net, data, joined_batches, part

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def loader(count=32, batch_size=8, **options):
    return DataLoader(TensorDataset(*data(count)), batch_size, **options)


# --- Steps without a loss -------------------------------------------------------------------------------------------


class Returns(Net):
    """Returns what `change` makes of the loss."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def training_step(self, batch, batch_idx):
        return self.change(super().training_step(batch, batch_idx), batch_idx)


MIXED = {"precision": {"name": "16-mixed", "init_scale": 256.0}}
OPTIONS = [{}, {"accumulate_grad_batches": 2}, MIXED, {"gradient_clip_val": 1.0}, {"strategy": "dp"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("change", "message"), [
    (lambda loss, _: {"Loss": loss, "n": 1}, r"training_step returned a dict with 'Loss', 'n'; expected one with 'loss'; did you mean 'Loss'"),
    (lambda loss, _: {}, r"training_step returned an empty dict; expected one with 'loss'"),
    (lambda loss, _: loss.item(), r"training_step returned a float; expected a loss"),
    (lambda loss, _: {"loss": loss.item()}, r"training_step returned a float under 'loss'; expected a loss"),
    (lambda loss, _: (loss, 1), r"training_step returned a tuple; expected a loss"),
    (lambda loss, _: "loss", r"training_step returned a str; expected a loss"),
    (lambda loss, _: loss.detach(), r"the loss of rank 0 reaches no trainable parameter"),
    (lambda loss, _: torch.stack([loss, loss]), r"training_step returned a loss of shape \(2,\); expected one number"),
    (lambda loss, _: loss * 1j, r"training_step returned a complex loss"),
    (lambda loss, _: None, r"training_step returned None for all 4 batches of epoch 0"),
    (lambda loss, _: {"loss": None}, r"training_step returned None for all 4 batches of epoch 0"),
])  # fmt: skip
def test_a_step_without_a_loss_is_refused(change, message, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(sg.StratagemError, match=message):
            sg.Trainer(max_epochs=3, **QUIET | options).fit(Returns(change), loader())


@pytest.mark.parametrize("options", [{"max_steps": 2}, {"limit_train_batches": 1}, {"fast_dev_run": True}], ids=str)
def test_a_run_that_is_shorter_than_an_epoch_trains_something(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(sg.StratagemError, match="training_step returned None for all"):
            sg.Trainer(**QUIET | options).fit(Returns(lambda loss, _: None), loader())


def test_a_closure_without_a_loss_is_refused():
    class Nothing(Lbfgs):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(sg.StratagemError, match="training_step returned None under LBFGS"):
        sg.Trainer(max_epochs=1, **QUIET).fit(Nothing(), joined_batches(2, 8))


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_a_skipped_batch_is_told_once_and_the_others_are_trained(options):
    """It counts as a batch and towards a step, as in Lightning; the parameters stay where nothing was added up."""
    seen = []

    class Skips(Returns):
        def on_train_batch_end(self, batch_idx):
            seen.append([p.detach().clone() for p in self.parameters()])

    module = Skips(lambda loss, batch_idx: None if batch_idx in (0, 1) else loss)
    before = [p.detach().clone() for p in module.parameters()]
    trainer = sg.Trainer(max_epochs=2, **QUIET | options)
    with pytest.warns(UserWarning, match="training_step returned None for batch 0 of epoch 0") as caught:
        trainer.fit(module, loader())

    assert len([w for w in caught if "training_step returned None" in str(w.message)]) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, seen[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, seen[3], strict=True))
    assert trainer.global_step == 8 // options.get("accumulate_grad_batches", 1)


def test_steps_by_hand_may_return_anything():
    class ByHand(Returns):
        automatic_optimization = False

    for value in (None, 1.0, {"Loss": 1}, "text", torch.ones(2)):
        trainer = sg.Trainer(max_epochs=1, **QUIET)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.fit(ByHand(lambda _, __, value=value: value), loader())
        assert trainer.current_epoch == 1


def _alone(rank, world_size, strategy, value):
    module = Returns(lambda loss, batch_idx: value if batch_idx == rank == 1 else loss)
    try:
        sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET).fit(module, _share(rank, world_size))
    except sg.StratagemError as error:
        return str(error)


def _together(rank, world_size):
    said = []
    for value in (None, {"Loss": 1}, "text", torch.ones(1)):
        module = Returns(lambda loss, batch_idx, value=value: value if batch_idx == 1 else loss)
        trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, **QUIET)
        try:
            trainer.fit(module, _share(rank, world_size))
        except sg.StratagemError as error:
            said.append(str(error))
        trainer.close()
    return said


def _share(rank, world_size):
    return part(joined_batches(4, 8), rank, world_size)


@pytest.mark.parametrize(("strategy", "value"), [("ddp", {"Loss": 1}), ("fsdp", "text"), ("ddp_sharded", None)])
def test_no_rank_waits_for_a_loss_that_does_not_come(strategy, value):
    for said in run_in_processes(_alone, 2, strategy, value):
        assert "training_step returned" in said


def test_all_ranks_may_lack_a_loss_together():
    for said in run_in_processes(_together, 2):
        assert ["training_step returned" in each for each in said[:3]] == [True] * 3
        assert "reaches no trainable parameter" in said[3]


# --- Modes ----------------------------------------------------------------------------------------------------------


class PartlyFrozen(Net):
    """Two parts in eval mode, as `__init__` left them; a third trains its statistics."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.BatchNorm1d(16).eval()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16)).eval()
        self.trained = nn.BatchNorm1d(16)
        self.modes_seen = []
        self.modes = {name: module.training for name, module in self.named_modules()}

    def forward(self, x):
        now = {name: module.training for name, module in self.named_modules()}
        self.modes_seen.append(now == self.modes if self.training else not any(now.values()))
        return super().forward(self.trained(self.backbone(self.frozen(x))))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]), sync_dist=True)


def statistics(module):
    return {n: b.clone() for n, b in module.named_buffers() if "running" in n}


def check_modes(module, before):
    """The modes are those of `__init__` and only the batch normalization that trains has new statistics."""
    after = statistics(module)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"trained"}
    assert {name: each.training for name, each in module.named_modules()} == module.modes
    assert all(module.modes_seen)


def quiet_fit(trainer, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(*arguments, **options)


CALLBACKS = [
    [], ["ema"], [{"name": "learning_rate_finder", "num_training_steps": 12}], [{"name": "batch_size_finder", "max_trials": 1}],
    [{"name": "stochastic_weight_averaging", "swa_lrs": 0.01, "swa_epoch_start": 0}],
]  # fmt: skip


@pytest.mark.parametrize("callbacks", CALLBACKS, ids=str)
def test_fit_keeps_the_modes_that_were_set(tmp_path, callbacks):
    """Over the sanity check, validation, a second fit, a test and a resumed fit."""
    module = PartlyFrozen()
    before = statistics(module)
    trainer = sg.Trainer(max_epochs=2, callbacks=callbacks, **QUIET)
    quiet_fit(trainer, module, loader(), loader())
    trainer.max_epochs = 3
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    check_modes(module, before)
    trainer.test(module, loader())
    quiet_fit(trainer, module, loader(), loader())
    check_modes(module, before)

    again, callbacks = PartlyFrozen(), copy.deepcopy(callbacks)
    quiet_fit(
        sg.Trainer(max_epochs=4, callbacks=callbacks, **QUIET), again, loader(), loader(), ckpt_path=tmp_path / "a.ckpt"
    )
    check_modes(again, before)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_processes_of_their_own_keep_the_modes(strategy):
    module = PartlyFrozen()
    before = statistics(module)
    quiet_fit(sg.Trainer(max_epochs=1, strategy=strategy, devices=2, **QUIET), module, loader(), loader())
    module.modes_seen = [True]
    check_modes(module, before)


def _modes_on_two(rank, world_size, strategy):
    module = PartlyFrozen()
    before = statistics(module)
    quiet_fit(sg.Trainer(max_epochs=2, strategy=strategy, devices=world_size, **QUIET), module, loader(), loader())
    check_modes(module, before)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_sharded"])
def test_ranks_keep_the_modes(strategy):
    run_in_processes(_modes_on_two, 2, strategy)


def test_a_part_that_is_frozen_as_training_starts_stays_so():
    class Later(PartlyFrozen):
        def on_train_start(self):
            self.trained.eval()
            self.modes["trained"] = False

    module = Later()
    before = statistics(module)
    quiet_fit(sg.Trainer(max_epochs=2, **QUIET), module, loader(), loader())
    assert all(torch.equal(before[name], value) for name, value in statistics(module).items())
    assert not module.trained.training


def test_a_mode_that_is_set_within_validation_ends_with_it():
    class Samples(PartlyFrozen):
        def on_validation_start(self):
            self.backbone[1].train()  # Monte Carlo dropout

    module = Samples()
    sg.Trainer(**QUIET).validate(module, loader())
    assert {name: each.training for name, each in module.named_modules()} == module.modes


def test_a_model_in_eval_mode_is_trained_so_with_a_warning():
    module = PartlyFrozen().eval()
    with pytest.warns(UserWarning, match=r"PartlyFrozen is in eval mode and stays so.*call model.train\(\)"):
        sg.Trainer(max_epochs=1, **QUIET).fit(module, loader())
    assert not any(each.training for each in module.modules())


def test_parts_in_eval_mode_are_named():
    with pytest.warns(UserWarning, match="PartlyFrozen has parts in eval mode, which stay so: frozen, backbone"):
        sg.Trainer(max_epochs=1, **QUIET).fit(PartlyFrozen(), loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sg.Trainer(max_epochs=1, **QUIET).fit(Net(), loader())


# --- Calls within calls ---------------------------------------------------------------------------------------------

EVENTS = ["training_step", "validation_step", "on_fit_start", "on_train_start", "on_train_batch_end",
          "on_before_optimizer_step", "on_train_epoch_end", "on_validation_end", "on_fit_end", "configure_optimizers"]  # fmt: skip


@pytest.mark.parametrize("inner", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_call_within_a_call_of_the_same_trainer_is_refused(event, inner):
    class Nested(Net):
        pass

    def nested(self, *arguments, **options):
        getattr(self.trainer, inner)(Net(), loader())

    setattr(Nested, event, nested)
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    with pytest.raises(sg.StratagemError, match=rf"trainer.{inner}\(\) was called within trainer.fit\(\)"):
        trainer.fit(Nested(), loader(), loader())
    trainer.fit(Net(), loader())  # the refusal leaves the trainer usable
    assert trainer.global_step == 4


def test_it_is_refused_within_other_calls_and_from_a_callback():
    class Nested(sg.Callback):
        @sg.hookimpl
        def on_test_batch_end(self, trainer, module):
            trainer.predict(module, loader())

    trainer = sg.Trainer(max_epochs=1, callbacks=[Nested()], **QUIET)
    with pytest.raises(sg.StratagemError, match=r"trainer.predict\(\) was called within trainer.test\(\)"):
        trainer.test(Net(), loader())


def test_another_trainer_within_a_call_leaves_the_outer_one_as_it_was():
    class Outer(Net):
        inner = None

        def on_train_batch_end(self, batch_idx):
            if batch_idx == 1:
                model = Net(3) if self.inner == "another" else self
                self.found = sg.Trainer(**QUIET).validate(model, loader())
            assert self.trainer.max_epochs == 2
            self.log("after", 1.0, on_epoch=True)

    weights = []
    for inner in ("another", "same"):
        module, trainer = Outer(), sg.Trainer(max_epochs=2, **QUIET)
        module.inner = inner
        trainer.fit(module, loader())
        assert (trainer.global_step, float(trainer.callback_metrics["after"])) == (8, 1.0)
        assert module.found
        weights.append(copy.deepcopy(module.state_dict()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _nested_on_two(rank, world_size):
    class Nested(Net):
        def on_train_batch_end(self):
            self.trainer.validate(self, loader())

    try:
        sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, **QUIET).fit(Nested(), loader())
    except sg.StratagemError as error:
        return str(error)


def test_it_is_refused_on_all_ranks():
    for said in run_in_processes(_nested_on_two, 2):
        assert "trainer.validate() was called within trainer.fit()" in said
