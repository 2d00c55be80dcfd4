"""Rates under a schedule after `learning_rate_finder`, and schedules after `batch_size_finder`, are those of an optimizer
that was made with what was found."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import BatchSizeFinder, GlobalBatchSize, GradientAccumulationScheduler, LearningRateFinder
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.training import share

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
STEPS = 16


def warmed_up(optimizer, _):
    first, then = schedules.LinearLR(optimizer, 0.1, 1.0, 5), schedules.CosineAnnealingLR(optimizer, 11)
    return schedules.SequentialLR(optimizer, [first, then], [5])


def chained(optimizer, _):
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.1, 4), schedules.ExponentialLR(optimizer, 0.9)]
    )


def both(optimizer, _):
    return schedules.ChainedScheduler([warmed_up(optimizer, _), schedules.StepLR(optimizer, 6)])


class OfOnesOwn:
    """A schedule that keeps groups, and calls its optimizer by another name."""

    def __init__(self, optimizer):
        self.steps, self.groups, self.mine = 0, optimizer.param_groups, optimizer
        self.bases = [group["lr"] for group in self.groups]

    def step(self):
        self.steps += 1
        for group, base in zip(self.groups if self.steps % 2 else self.mine.param_groups, self.bases, strict=True):
            group["lr"] = base * 0.9**self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


#: Make a scheduler of an optimizer and the rate of its first group.
MULTIPLIED = {
    "LambdaLR": lambda o, _: schedules.LambdaLR(o, lambda step: min(1.0, step / 5)),
    "MultiplicativeLR": lambda o, _: schedules.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o, _: schedules.StepLR(o, 4),
    "MultiStepLR": lambda o, _: schedules.MultiStepLR(o, [3, 6]),
    "ConstantLR": lambda o, _: schedules.ConstantLR(o, 0.1, 5),
    "LinearLR": lambda o, _: schedules.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o, _: schedules.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o, _: schedules.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o, _: schedules.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o, _: schedules.CosineAnnealingWarmRestarts(o, 5),
    "ReduceLROnPlateau": lambda o, _: schedules.ReduceLROnPlateau(o, patience=0, threshold=10.0, factor=0.5),
    "SequentialLR": warmed_up,
    "ChainedScheduler": chained,
    "both": both,
}
OF_THEIR_OWN = {
    "OneCycleLR": lambda o, rate: schedules.OneCycleLR(o, [rate, rate / 10], total_steps=STEPS + 1),
    "CyclicLR": lambda o, rate: schedules.CyclicLR(o, [rate / 10, rate / 100], [rate, rate / 10], 4, cycle_momentum=False),
    "within another": lambda o, rate: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 2), OF_THEIR_OWN["OneCycleLR"](o, rate)], [2]
    ),
}  # fmt: skip
READ_ALONE = {
    "CosineAnnealingLR to a rate": lambda o, rate: schedules.CosineAnnealingLR(o, STEPS, eta_min=rate / 20),
    "one's own": lambda o, _: OfOnesOwn(o),
}
SCHEDULES = MULTIPLIED | OF_THEIR_OWN | READ_ALONE


class Scheduled(sg.Module):
    def __init__(self, name, rate, fixed=None):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.name, self.lr, self.fixed = nn.Linear(4, 1), name, rate, fixed
        self.used = []

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        rate = self.lr if self.fixed is None else self.fixed
        groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": rate / 10}]
        optimizer = torch.optim.SGD(groups, rate, momentum=0.9)
        schedule = SCHEDULES[self.name](optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": "loss"}]

    def on_before_optimizer_step(self, optimizer):
        self.used.append([float(group["lr"]) for group in self.trainer.optimizers[0].param_groups])


class InHyperParameters(Scheduled):
    def __init__(self, name, rate):
        super().__init__(name, 0.0)
        del self.lr
        self.save_hyperparameters({"lr": rate})

    lr = property(lambda self: self.hparams["lr"], lambda *_: None, lambda _: None)


def rows():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return [(part, part.sum(1, keepdim=True)) for part in x.split(16)]


def trained(module, finder=None, loader=None, **options):
    callbacks = [] if finder is None else [finder]
    trainer = sg.Trainer(**QUIET | {"devices": 1} | options, max_steps=STEPS, callbacks=callbacks)
    trainer.fit(module, loader or rows())
    return module.used[-STEPS:]


def finder():
    return LearningRateFinder(min_lr=1e-5, max_lr=0.5, early_stop_threshold=None, num_training_steps=40)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_rates_are_those_of_an_optimizer_made_with_the_found_one(name):
    used = trained(module := Scheduled(name, 0.03), search := finder())

    right = trained(Scheduled(name, search.suggestion))
    assert module.lr == search.suggestion
    torch.testing.assert_close(torch.tensor(used), torch.tensor(right), rtol=1e-6, atol=1e-12)
    assert not torch.allclose(torch.tensor(used), torch.tensor(trained(Scheduled(name, 0.03))))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(MULTIPLIED))
def test_rates_that_the_module_does_not_read_are_scaled(name):
    used = trained(Scheduled(name, 7.0, fixed=0.03), search := finder())

    right = trained(Scheduled(name, search.suggestion))
    torch.testing.assert_close(torch.tensor(used), torch.tensor(right), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", list(OF_THEIR_OWN))
def test_rates_that_stay_as_they_are_are_refused(name):
    with pytest.raises(ConfigError, match=r"the schedule's own rates are .*; expected rates .*self\.lr"):
        trained(Scheduled(name, 7.0, fixed=0.03), finder())


#: The rates of two groups, made of the module's rate.
LAYOUTS = {
    "smaller first": lambda rate: [rate / 10, rate],
    "larger first": lambda rate: [rate * 3, rate],
    "scaled": lambda rate: [rate * 8, rate * 8],
    "first of zero": lambda rate: [0.0, rate],
}
OF_GROUPS = {
    "none": None,
    "CosineAnnealingLR to a rate": lambda o, rates: schedules.CosineAnnealingLR(o, STEPS, eta_min=max(rates) / 20),
    "OneCycleLR": lambda o, rates: schedules.OneCycleLR(o, rates, total_steps=STEPS + 1),
    "CyclicLR": lambda o, rates: schedules.CyclicLR(o, 1e-5, rates, 4, cycle_momentum=False),
    "SequentialLR": lambda o, rates: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 5), schedules.OneCycleLR(o, rates, total_steps=STEPS)], [5]
    ),
}


class Layout(Scheduled):
    def __init__(self, layout, name, rate):
        super().__init__(name, rate)
        self.layout = layout

    def configure_optimizers(self):
        rates = self.layout(self.lr)
        parts = (self.net.bias, self.net.weight)
        groups = [{"params": [part], "lr": rate} for part, rate in zip(parts, rates, strict=True)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        if self.name == "none":
            return optimizer
        return [optimizer], [{"scheduler": OF_GROUPS[self.name](optimizer, rates), "interval": "step"}]


def wide_finder():
    return LearningRateFinder(min_lr=1e-6, num_training_steps=80)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(OF_GROUPS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_groups_have_the_rates_that_the_module_computes_from_the_found_one(layout, name):
    rates = LAYOUTS[layout]
    used = trained(module := Layout(rates, name, 0.03), search := wide_finder())

    right = search.suggestion / next(rate for rate in rates(1.0) if rate)
    assert module.lr == pytest.approx(right)
    expected = trained(Layout(rates, name, right))
    torch.testing.assert_close(torch.tensor(used), torch.tensor(expected), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("fixed", [lambda rate: [0.01, rate], lambda rate: [rate, 0.02]])
def test_a_group_whose_own_rate_is_not_computed_from_the_module_is_refused(fixed):
    with pytest.raises(ConfigError, match=r"the schedule's own rates are .*; expected rates .*self\.lr"):
        trained(Layout(fixed, "OneCycleLR", 0.03), wide_finder())


def test_rates_of_hyper_parameters_are_found_and_update_can_be_left_out():
    used = trained(InHyperParameters("OneCycleLR", 0.03), search := finder())
    right = trained(Scheduled("OneCycleLR", search.suggestion))
    torch.testing.assert_close(torch.tensor(used), torch.tensor(right), rtol=1e-6, atol=1e-12)

    search.update = False
    assert trained(Scheduled("OneCycleLR", 7.0, fixed=0.03), search) == trained(Scheduled("OneCycleLR", 0.03))


def _rates_of_ranks(rank, world_size, strategy):
    options = {"strategy": strategy, "devices": world_size}
    found = {}
    for name, fixed in (("SequentialLR", None), ("SequentialLR", 0.03), ("OneCycleLR", None)):
        module, search = Scheduled(name, 0.03, fixed), finder()
        trainer = sg.Trainer(**QUIET | options, max_steps=STEPS, callbacks=search)
        trainer.fit(module, share(trainer, rows()))
        found[name, fixed] = search.suggestion, module.used[-STEPS:]
    return found


@pytest.mark.slow
@pytest.mark.when_changed(
    "plugins/callbacks/",
    cases=(
        "fsdp",
        "ddp_sharded",
    ),
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_sharded"])
def test_rates_on_two_ranks(strategy):
    for results in run_in_processes(_rates_of_ranks, 2, strategy):
        for (name, _), (suggestion, used) in results.items():
            right = trained(Scheduled(name, suggestion))
            torch.testing.assert_close(torch.tensor(used), torch.tensor(right), rtol=1e-6, atol=1e-12)


def test_a_resumed_run_continues_with_the_found_rates(tmp_path):
    straight = trained(Scheduled("both", 7.0, fixed=0.03), search := finder())
    module = Scheduled("both", 7.0, fixed=0.03)
    trainer = sg.Trainer(**QUIET, devices=1, max_steps=6, callbacks=finder())
    trainer.fit(module, rows())
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    again = Scheduled("both", 7.0, fixed=0.03)
    sg.Trainer(**QUIET, devices=1, max_steps=STEPS, callbacks=search).fit(
        again, rows(), ckpt_path=tmp_path / "six.ckpt"
    )

    assert module.used[-6:] + again.used == straight


# --- Schedules that ask how long training is ----------------------------------------------------------------------


class Lasting(Scheduled):
    """Rates fall to zero, or to a tenth, at the end of training."""

    def __init__(self, name, batch_size=2):
        super().__init__(name, 0.03)
        self.batch_size = batch_size

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01 * self.batch_size)
        steps = self.trainer.estimated_stepping_batches
        make = {
            "OneCycleLR": lambda: schedules.OneCycleLR(optimizer, 0.1, total_steps=steps + 1),
            "LambdaLR": lambda: schedules.LambdaLR(optimizer, functools.partial(_falling, steps=steps)),
        }[self.name]
        return [optimizer], [{"scheduler": make(), "interval": "step"}]


def _falling(step, steps):
    return 1 - 0.9 * step / steps


def small_batches(size):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size)


@pytest.mark.slow
@pytest.mark.when_changed("plugins/callbacks/", cases=("OneCycleLR",))
@pytest.mark.parametrize("name", ["OneCycleLR", "LambdaLR"])
def test_a_schedule_has_the_length_of_training_with_the_found_batch_size(tmp_path, name):
    def fit(module, size, stop=-1, path=None, callbacks=()):
        trainer = sg.Trainer(**QUIET, devices=1, max_epochs=3, callbacks=callbacks)
        module.on_train_epoch_end = lambda: setattr(trainer, "should_stop", module.current_epoch == stop)
        trainer.fit(module, small_batches(size), ckpt_path=path)
        return trainer

    right, module = Lasting(name, 16), Lasting(name)
    fit(right, 16)
    fit(module, 2, callbacks=(search := BatchSizeFinder(max_trials=4)))
    assert search.optimal_batch_size == 16
    assert module.used[-12:] == right.used

    first, again = Lasting(name), Lasting(name)
    fit(first, 2, 0, callbacks=copy.deepcopy(search)).save_checkpoint(tmp_path / "one.ckpt")
    fit(again, 2, path=tmp_path / "one.ckpt", callbacks=BatchSizeFinder(max_trials=4))
    assert again.batch_size == 16
    assert again.used == right.used[4:]


@pytest.mark.parametrize("strategy", [None, "fsdp"])
@pytest.mark.parametrize(
    "callback", [GlobalBatchSize(samples=16), GradientAccumulationScheduler({0: 4})], ids=["size", "schedule"]
)
def test_a_schedule_has_the_length_of_training_with_the_accumulation_of_a_callback(callback, strategy):
    module, right = Lasting("OneCycleLR", 4), Lasting("OneCycleLR", 4)
    for each, options in ((module, {"callbacks": callback}), (right, {"accumulate_grad_batches": 4})):
        options = options | ({} if strategy is None else {"strategy": strategy})
        sg.Trainer(**QUIET, devices=1, max_epochs=3, **options).fit(each, small_batches(4))

    assert module.used == right.used
    assert len(right.used) == 12
