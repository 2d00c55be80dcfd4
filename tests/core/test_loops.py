"""What the training loop does with steps, modes and calls that are not as they should be."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Lbfgs, Net, data, joined_batches, part, relative_difference
from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig
from stratagem_trainer.batches import ResumableBatches
from stratagem_trainer.events import Events
from stratagem_trainer.loops import TrainLoop
from stratagem_trainer.progress import Position

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


@pytest.mark.every_push("ddp_sharded-None")
@pytest.mark.parametrize(("strategy", "value"), [("ddp", {"Loss": 1}), ("fsdp", "text"), ("ddp_sharded", None)])
def test_no_rank_waits_for_a_loss_that_does_not_come(strategy, value):
    for said in run_in_processes(_alone, 2, strategy, value):
        assert "training_step returned" in said


@pytest.mark.slow
def test_all_ranks_may_lack_a_loss_together():
    for said in run_in_processes(_together, 2):
        assert ["training_step returned" in each for each in said[:3]] == [True] * 3
        assert "reaches no trainable parameter" in said[3]


# --- Short accumulation windows -------------------------------------------------------------------------------------


def plainly(batches, accumulate, divisor, clip):
    module = Net()
    optimizer = module.configure_optimizers()
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        for x, y in window:
            (module.criterion(module(x), y) / (divisor or len(window))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "list"])
@pytest.mark.parametrize("accumulate", [3, 7, 9])
def test_a_short_window_is_averaged_over_its_batches(accumulate, stream, average, clip):
    module, batches = Net(), joined_batches(8, 4)
    trainer = sg.Trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, average_short_window=average, gradient_clip_val=clip, **QUIET
    )
    trainer.fit(module, map(tuple, batches) if stream else batches)

    reference = plainly(batches, accumulate, None if average else accumulate, clip)
    assert relative_difference(module.state_dict(), reference) < 1e-6


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


@pytest.mark.slow
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


@pytest.mark.every_push("ddp_fork")
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


@pytest.mark.every_push("ddp_sharded")
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


@pytest.mark.every_push("on_before_optimizer_step-validate", "configure_optimizers-test")
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


# --- The loop without a fit --------------------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path):
    """Make the loop of a fit that has not begun."""
    trainers = []

    def make(module=None, optimizers=1, manual=False, **arguments):
        trainer = sg.Trainer(**QUIET | {"default_root_dir": tmp_path} | arguments)
        trainers.append(trainer)
        trainer.run.connect()
        state = trainer._state
        state.module = module or Net()
        state.module.__dict__["_fit"] = state
        state.begin(Events(state))
        trainer.run.manual = manual
        trainer.run.prepare(state.module, lambda: [state.module.configure_optimizers() for _ in range(optimizers)])
        batches = joined_batches(2, 8)
        return TrainLoop(
            state, ResumableBatches(batches, len(batches), trainer.run, state.module), lambda: None, lambda: None
        )

    yield make
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize(
    ("limits", "epoch", "step", "stops", "finished"),
    [
        ({"max_epochs": 2}, 1, 0, False, False),
        ({"max_epochs": 2}, 2, 0, False, True),
        ({"max_epochs": 0}, 0, 0, False, True),
        ({"max_epochs": -1}, 10_000, 0, False, False),
        ({"max_steps": 3}, 0, 2, False, False),
        ({"max_steps": 3}, 0, 3, False, True),
        ({"max_steps": 0}, 0, 0, False, True),
        ({"max_time": 0.0}, 0, 0, False, True),
        ({"max_epochs": 9}, 0, 0, True, True),
        ({"max_epochs": 9, "min_epochs": 2}, 1, 5, True, False),
        ({"max_epochs": 9, "min_epochs": 2}, 2, 5, True, True),
        ({"max_epochs": 9, "min_steps": 5}, 1, 4, True, False),
        ({"max_epochs": 9, "min_steps": 5}, 1, 5, True, True),
        ({"max_steps": 3, "min_epochs": 5}, 0, 3, False, True),
    ],
    ids=str,
)
def test_training_ends_at_the_first_limit_and_not_before_the_minimum(loop, limits, epoch, step, stops, finished):
    made = loop(**limits)
    made.position.epoch, made.position.global_step, made.state.should_stop = epoch, step, stops

    assert made._finished() is finished


def test_a_new_epoch_begins_at_its_first_batch(loop):
    made = loop()
    made.position.batches_done, made.position.epoch_done, made.position.epoch_ended = 2, True, True
    made.position.validated, made.position.epoch_random_state = False, {}
    made._begin(4)

    begun = Position(epoch=4, batches_of_earlier_epochs=2)
    assert made.position.state_dict() | {"global_step": 0} == begun.state_dict()
    assert made.position.epoch_random_state is None


@pytest.mark.parametrize("answer", [-1, np.int64(-1), torch.tensor(-1)], ids=str)
def test_minus_one_skips_the_rest_of_an_epoch(answer):
    TrainLoop._check_answer(answer, 3)


@pytest.mark.parametrize("answer", [0, 1, -2, True, False, "-1", -1.0, torch.tensor([1, 2])], ids=str)
def test_another_answer_is_refused(answer):
    with pytest.raises(ConfigError, match="at batch 3; expected None, or -1 to skip the rest of the epoch"):
        TrainLoop._check_answer(answer, 3)


def test_skipping_drops_the_gradients_of_an_open_window(loop):
    made = loop(accumulate_grad_batches=2)
    parameter = next(made.state.module.parameters())
    parameter.grad = torch.ones_like(parameter)
    next(made.train_batches.epoch(made.position, 2))
    made._skip_rest(1)

    assert parameter.grad is None
    assert not made.train_batches.window_is_open
    assert (made.position.batches_done, made.position.epoch_done, made.skips_rest) == (1, True, True)


def test_epochs_that_are_skipped_without_a_limit_are_refused(loop):
    endless, limited = loop(max_epochs=-1), loop(max_epochs=5)
    for made in (endless, limited):
        with pytest.warns(UserWarning, match="at the first batch of epoch 0: nothing was trained in it"):
            made._check_skipped()
        made.position.epoch = 1
    limited._check_skipped()

    with pytest.raises(ConfigError, match="of epochs 0 and 1, and max_epochs sets no limit"):
        endless._check_skipped()


def test_a_skipped_step_counts_and_leaves_the_schedulers(loop):
    made = loop()
    scheduler = torch.optim.lr_scheduler.StepLR(made.run.optimizers[0], 1)
    made.step_schedulers = [LRSchedulerConfig(scheduler=scheduler, interval="step", frequency=2)]
    made.run.optimizers[0].step()
    for stepped in (True, False, True, True):
        made.step.stepped = stepped
        made.count_step(stepped)
        made._step_schedulers()

    assert (made.position.global_step, made.position.skipped_steps) == (4, 1)
    assert scheduler.last_epoch == 1  # at step 4; step 2 was skipped


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"module": Lbfgs(), "accumulate_grad_batches": 2}, "accumulate_grad_batches is 2 with LBFGS"),
        ({"manual": True, "accumulate_grad_batches": 2}, "accumulate_grad_batches is 2 with Net.automatic_optim"),
        ({"manual": True, "gradient_clip_val": 0.5}, "gradient_clip_val is 0.5 with Net.automatic_optimization"),
    ],
    ids=["closure", "accumulation", "clipping"],
)
def test_optimizers_that_the_loop_cannot_step_are_refused(loop, made, message):
    with pytest.raises(ConfigError) as refused:
        loop(**made)

    assert message in str(refused.value)


@pytest.mark.parametrize(
    "callback",
    [
        {"name": "gradient_accumulation_scheduler", "scheduling": {0: 2}},
        {"name": "global_batch_size", "samples": 16},
    ],
    ids=str,
)
def test_a_schedule_of_accumulation_is_refused_for_an_optimizer_that_evaluates_the_model(callback):
    samples = [(x, y) for batch in joined_batches(4, 8) for x, y in zip(*batch, strict=True)]
    trainer = sg.Trainer(max_epochs=1, callbacks=[callback], **QUIET)
    with pytest.raises(ConfigError, match="accumulate_grad_batches is 2 with LBFGS, which evaluates the model itself"):
        trainer.fit(Lbfgs(), torch.utils.data.DataLoader(samples, batch_size=8))


def test_a_checkpoint_past_the_end_of_an_epoch_ends_it_with_a_warning(loop):
    made = loop()
    made.position.batches_done = 9
    with pytest.warns(UserWarning, match="after 9 batches of epoch 0, and an epoch has 2 now"):
        made._end_longer_epoch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made._end_longer_epoch()  # told once

    assert made.position.epoch_done
