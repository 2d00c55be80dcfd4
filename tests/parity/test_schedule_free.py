"""Optimizers with train() and eval() equal plain PyTorch in both sets of weights, and saves change nothing."""

from __future__ import annotations

import functools

import pytest
import schedulefree
import torch
from torch import nn

import stratagem as sg
from stratagem.callbacks import BaseFinetuning, OnExceptionCheckpoint
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import joined_batches, loss_of, net, part, relative_difference
from stratagem_testing.training import weights_of

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
BATCHES = joined_batches(8, 16)
CHECKED = joined_batches(4, 16, seed=6)
MAKERS = {
    "adamw": functools.partial(schedulefree.AdamWScheduleFree, lr=0.02, warmup_steps=3, weight_decay=0.1),
    "radam": functools.partial(schedulefree.RAdamScheduleFree, lr=0.02),
    "sgd": functools.partial(schedulefree.SGDScheduleFree, lr=0.05, foreach=False),
    "wrapper": lambda parameters: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=0.05), momentum=0.9),
}


class Free(sg.Module):
    def __init__(self, maker="adamw"):
        super().__init__()
        self.net, self.maker, self.val_losses = net(), maker, []
        self.net[2].bias.requires_grad_(False)

    def parallel_plan(self):
        return {"net.0": "colwise", "net.2": "rowwise"}

    def training_step(self, batch, batch_idx):
        return loss_of(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", loss_of(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_end(self):
        self.val_losses.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self):
        return MAKERS[self.maker](p for p in self.parameters() if p.requires_grad)


class ByHand(Free):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def plain(maker="adamw", max_norm=None, accumulate=1, epochs=2, validates_after=8):
    """Return the evaluation weights, the training weights and the validation losses of one process."""
    model, losses = Free(maker), []

    def validate():
        optimizer.eval()
        with torch.no_grad():
            losses.append(sum(float(loss_of(model.net(x), y)) for x, y in CHECKED) / len(CHECKED))

    optimizer = model.configure_optimizers()
    for _ in range(epochs):
        optimizer.train()
        for start in range(0, len(BATCHES), accumulate):
            for batch in BATCHES[start : start + accumulate]:
                (model.training_step(batch, 0) / accumulate).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if start + accumulate == validates_after < len(BATCHES):
                validate()
                optimizer.train()
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        if validates_after == len(BATCHES):
            validate()
    optimizer.eval()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, trained, losses


def saved(trainer, path):
    """Return both sets of weights in a checkpoint that is saved now."""
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)
    entries = state["optimizers"][0]["state"]
    return state["state_dict"], {name: entry["training_weight"] for name, entry in entries.items()}


def fit_on_ranks(rank, world_size, folder, strategy, module, maker, whole, arguments):
    model = module(maker)
    trainer = sg.Trainer(max_epochs=2, devices=world_size, strategy=strategy, **QUIET, **arguments)
    own = BATCHES if whole else part(BATCHES, rank, world_size)
    trainer.fit(model, own, CHECKED if whole else part(CHECKED, rank, world_size))
    return weights_of(trainer), *saved(trainer, folder / "saved.ckpt"), model.val_losses[1:]


SPREAD = [
    pytest.param("ddp", False, id="ddp"),
    pytest.param("ddp_sharded", False, id="ddp_sharded"),
    pytest.param("fsdp", False, id="fsdp"),
    pytest.param({"name": "parallel", "tensor": 2}, True, id="tensor"),
    pytest.param({"name": "parallel", "shard": 2}, False, id="shard"),
]
CASES = {
    "plain": ({}, {}),
    "clipped": ({"gradient_clip_val": 0.5}, {"max_norm": 0.5}),
    "accumulated": ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"max_norm": 0.5, "accumulate": 2}),
}


@pytest.mark.slow
@pytest.mark.every_push("fsdp-accumulated", "tensor-clipped", "ddp_sharded-clipped", "ddp-plain")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("strategy", "whole"), SPREAD)
def test_both_sets_of_weights_equal_one_process(tmp_path, strategy, whole, case):
    arguments, reference = CASES[case]
    first, second = run_in_processes(fit_on_ranks, 2, tmp_path, strategy, Free, "adamw", whole, arguments)
    evaluated, trained, losses = plain(**reference)

    assert relative_difference(first[0], evaluated) < 1e-6
    assert relative_difference(first[1], evaluated) < 1e-6
    assert relative_difference(first[2], trained) < 1e-6
    assert relative_difference(trained, {name: evaluated[name] for name in trained}) > 1e-3
    assert first[3] == pytest.approx(losses, rel=1e-5)
    assert relative_difference(first[0], second[0]) == 0


@pytest.mark.slow
@pytest.mark.every_push("ddp_sharded-radam")
@pytest.mark.parametrize("maker", ["radam", "sgd", "wrapper"])
@pytest.mark.parametrize(("strategy", "whole"), SPREAD[1:4])
def test_other_optimizers_equal_one_process(tmp_path, strategy, whole, maker):
    first, _ = run_in_processes(fit_on_ranks, 2, tmp_path, strategy, Free, maker, whole, {})
    evaluated, trained, losses = plain(maker)

    assert relative_difference(first[0], evaluated) < 1e-6
    assert relative_difference(first[2], trained) < 1e-6
    assert first[3] == pytest.approx(losses, rel=1e-5)


class InWindows(ByHand):
    """Steps after each second batch."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(Free.training_step(self, batch, batch_idx) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("strategy", "whole"), SPREAD[1:3])
def test_manual_optimization_equals_one_process(tmp_path, strategy, whole, windows):
    """A validation within a window computes with the evaluation weights, too."""
    module, arguments = (InWindows, {"val_check_interval": 7}) if windows else (ByHand, {})
    first, _ = run_in_processes(fit_on_ranks, 2, tmp_path, strategy, module, "adamw", whole, arguments)
    evaluated, trained, losses = plain(accumulate=2, validates_after=6) if windows else plain()

    assert relative_difference(first[0], evaluated) < 1e-6
    assert relative_difference(first[2], trained) < 1e-6
    assert first[3] == pytest.approx(losses, rel=1e-5)


def loop(rank, world_size, strategy):
    """A loop without a Trainer calls the methods itself."""
    torch.set_num_threads(1)
    losses, model = [], net()
    with sg.Run(strategy=strategy, devices=world_size, accelerator="cpu") as run:
        model, optimizer = run.setup(model, MAKERS["adamw"](model.parameters()))
        for _ in range(2):
            optimizer.train()
            for x, y in part(BATCHES, rank, world_size):
                run.backward(loss_of(model(x), y))
                run.optimizer_step(optimizer)
                optimizer.zero_grad()
            optimizer.eval()
            with torch.no_grad():
                losses.append(float(sum(loss_of(model(x), y) for x, y in CHECKED) / len(CHECKED)))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_sharded", {"name": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"}])
def test_a_loop_by_hand_equals_one_process(strategy):
    (one,), (first, _) = (run_in_processes(loop, each, strategy) for each in (1, 2))

    assert first == pytest.approx(one, rel=1e-5)


# --- Saves and stops ---------------------------------------------------------------------------------------------


class SavesAt(sg.Callback):
    """Saves after some batches and at the end of each validation."""

    def __init__(self, folder, *steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer, module):
        if trainer.fitting:
            trainer.save_checkpoint(self.folder / f"validated{trainer.global_step}.ckpt")


def fit_saving(rank, world_size, folder, strategy, whole, precision):
    """Train without a break, with saves, and from each of them on; return the weights of each."""

    def fit(path=None, callbacks=()):
        trainer = sg.Trainer(
            max_epochs=2, devices=world_size, strategy=strategy, precision=precision, callbacks=list(callbacks),
            **QUIET,
        )  # fmt: skip
        batches, checked = (
            (BATCHES, CHECKED) if whole else [part(each, rank, world_size) for each in (BATCHES, CHECKED)]
        )
        trainer.fit(Free(), batches, checked, ckpt_path=path)
        both = weights_of(trainer), saved(trainer, folder / "end.ckpt")[1]
        trainer.close()
        return both

    names = ("step3", "validated8", "step13")
    return fit(), fit(callbacks=[SavesAt(folder, 3, 8, 13)]), *[fit(folder / f"{name}.ckpt") for name in names]


@pytest.mark.when_changed("plugins/fsdp/", "plugins/libraries/", cases=("fsdp-32-true",))
@pytest.mark.slow
@pytest.mark.every_push("ddp_sharded-32-true", "fsdp-32-true")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize(("strategy", "whole"), SPREAD)
def test_saves_change_nothing_and_resume_exactly(tmp_path, strategy, whole, precision):
    (without, *others), _ = run_in_processes(fit_saving, 2, tmp_path, strategy, whole, precision)

    for other in others:
        assert relative_difference(other[0], without[0]) == 0
        assert relative_difference(other[1], without[1]) == 0


def train(model, trainer=None, batches=BATCHES, **arguments):
    trainer = trainer or sg.Trainer(**{"max_epochs": 2} | QUIET | arguments)
    trainer.fit(model, batches, CHECKED)
    return trainer


def test_a_second_fit_continues_exactly():
    once, twice = Free(), Free()
    train(once)
    trainer = train(twice, max_epochs=1)
    trainer.max_epochs = 2
    train(twice, trainer)

    assert relative_difference(twice.state_dict(), once.state_dict()) == 0


def test_weights_that_were_loaded_between_two_fits_are_trained(tmp_path):
    model = Free()
    trainer = train(model, max_epochs=1)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    trainer.save_checkpoint(tmp_path / "zeros.ckpt")
    (moments,) = torch.load(tmp_path / "zeros.ckpt")["optimizers"]
    started = []
    model.on_train_start = lambda: started.extend(p.detach().clone() for p in model.parameters() if p.requires_grad)
    trainer.max_epochs = 2
    train(model, trainer)

    assert all("training_weight" not in entry for entry in moments["state"].values())
    for parameter, entry in zip(started, moments["state"].values(), strict=True):
        assert torch.allclose(parameter, 0.1 * entry["z"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.when_changed("plugins/ddp/", "plugins/basics/"))],
)
def test_a_fit_in_other_processes_leaves_evaluation_weights(tmp_path, strategy):
    """The checkpoint that the first process saves continues exactly; so does a second fit, up to rounding."""
    once, model, resumed = Free(), Free(), Free()
    train(once, max_epochs=2)
    trainer = train(model, max_epochs=1, strategy=strategy, devices=1, num_nodes=1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    sg.Trainer(max_epochs=2, **QUIET).fit(resumed, BATCHES, CHECKED, ckpt_path=tmp_path / "first.ckpt")
    trainer.max_epochs = 2
    train(model, trainer)
    continued = {name: value.clone() for name, value in model.state_dict().items()}
    torch.nn.init.zeros_(model.net[0].weight)
    trainer.max_epochs = 3
    train(model, trainer, BATCHES[:1])

    assert relative_difference(resumed.state_dict(), once.state_dict()) == 0
    assert relative_difference(continued, once.state_dict()) < 1e-6
    assert model.net[0].weight.abs().max() < 0.5 * continued["net.0.weight"].abs().max()


class Fails(Free):
    def on_validation_epoch_end(self):
        if self.failing == "validating" and not self.trainer.sanity_checking:
            raise KeyError("stopped")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.failing == "training" and batch_idx == 7:
            raise KeyError("stopped")


@pytest.mark.parametrize("failing", ["training", "validating"])
def test_an_exception_leaves_evaluation_weights_and_a_checkpoint_to_go_on_from(tmp_path, failing):
    once, model, resumed = Free(), Fails(), Free()
    train(once)
    model.failing = failing
    callback = OnExceptionCheckpoint(dirpath=tmp_path, filename="stopped")
    with pytest.raises(KeyError):
        train(model, callbacks=[callback])
    sg.Trainer(max_epochs=2, **QUIET).fit(resumed, BATCHES, CHECKED, ckpt_path=tmp_path / "stopped.ckpt")

    assert relative_difference(model.state_dict(), plain(epochs=1)[0]) < 1e-6
    assert relative_difference(resumed.state_dict(), once.state_dict()) == 0


def test_trial_steps_leave_both_sets_of_weights(tmp_path):
    once, model = Free(), Free()
    train(once)

    class Tries(sg.Callback):
        def on_fit_start(self, trainer, module):
            with trainer.trial_steps("a test") as step:
                step(BATCHES[0], 0)
            trainer.save_checkpoint(tmp_path / "tried.ckpt")

        on_train_start = on_fit_start

    trainer = train(model, max_epochs=1, callbacks=[Tries()], num_sanity_val_steps=-1)
    trainer.max_epochs = 2
    train(model, trainer)

    assert relative_difference(model.state_dict(), once.state_dict()) == 0
    assert model.val_losses[2] == model.val_losses[1]  # the sanity check of the second fit


def test_a_module_may_switch_them_too():
    class Switches(Free):
        def on_validation_start(self):
            self.optimizers().eval()

        def on_validation_end(self):
            self.optimizers().train()

    once, model = Free(), Switches()
    train(once)
    train(model)

    assert relative_difference(model.state_dict(), once.state_dict()) == 0


# --- What is refused ---------------------------------------------------------------------------------------------


def _refused(rank, world_size, strategy):
    with pytest.raises(ConfigError, match="AdamWScheduleFree has train.. and eval.., which replace the weights, and"):
        train(Free(), strategy=strategy)


@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_strategies_that_step_copies_refuse_it(strategy):
    run_in_processes(_refused, 1, strategy)


@pytest.mark.parametrize("callback", ["ema", "stochastic_weight_averaging"])
def test_a_second_average_is_refused(callback):
    options = {"name": callback} | ({"swa_lrs": 0.1} if callback != "ema" else {})
    with pytest.raises(ConfigError, match="AdamWScheduleFree averages the weights itself"):
        train(Free(), callbacks=[options])


def test_parameters_that_are_added_are_trained_and_evaluated():
    class Later(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.02)

    model = Free()
    train(model, max_epochs=3, callbacks=[Later()])
    reference, losses = Free(), []
    reference.net[0].requires_grad_(False)
    optimizer = reference.configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            reference.net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(reference.net[0].parameters()), "lr": 0.02})
        optimizer.train()
        for batch in BATCHES:
            reference.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(sum(float(loss_of(reference.net(x), y)) for x, y in CHECKED) / len(CHECKED))

    assert relative_difference(model.state_dict(), reference.state_dict()) < 1e-6
    assert model.val_losses[1:] == pytest.approx(losses, rel=1e-5)
