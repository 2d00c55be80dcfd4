"""The learning-rate finder suggests a rate that trains, or says that it found none and keeps the one there is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import LearningRateFinder
from stratagem_callbacks.learning_rate_finder import steepest

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def mlp():
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


class Problem(sg.Module):
    def __init__(self, net, make_optimizer):
        super().__init__()
        self.net, self.make_optimizer, self.lr = net, make_optimizer, 0.123

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), lr=self.lr)


def regression(seed, noise=0.1, signal=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 4, generator=generator)
    y = signal * x.sum(1, keepdim=True) + noise * torch.randn(64, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


#: Network, optimizer, and rates that train it: a tenth of the loss is left after a hundred steps.
PROBLEMS = {
    "linear, SGD": (lambda: nn.Linear(4, 1), torch.optim.SGD),
    "perceptron, SGD with momentum": (mlp, momentum),
    "perceptron, Adam": (mlp, torch.optim.Adam),
}


def fit(problem, seed, finder, **data):
    make_net, make_optimizer = PROBLEMS[problem]
    torch.manual_seed(seed)
    module = Problem(make_net(), make_optimizer)
    batches = regression(seed, **data)
    sg.Trainer(max_steps=100, callbacks=finder, **QUIET).fit(module, batches)
    x, y = batches.dataset.tensors
    return module, (nn.functional.mse_loss(module.net(x), y) / y.var()).item()


@pytest.mark.every_push("linear, SGD-2")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("problem", list(PROBLEMS))
def test_the_suggested_rate_trains_small_problems(problem, seed):
    finder = LearningRateFinder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, rest = fit(problem, seed, finder)

    assert 1e-4 < finder.suggestion < 0.2
    assert rest < 0.25


@pytest.mark.every_push("diverging-linear, SGD-1")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("problem", list(PROBLEMS))
@pytest.mark.parametrize(("options", "data"), [
    ({"max_lr": 1e-7}, {}),  # flat: nothing is learned at such rates
    ({"min_lr": 30.0, "max_lr": 1000.0}, {}),  # diverges from the start
    ({"max_lr": 1e-3}, {"noise": 3.0, "signal": 0.0}),  # there is nothing to learn
], ids=["flat", "diverging", "noise"])  # fmt: skip
def test_a_curve_without_a_usable_slope_keeps_the_rate(problem, seed, options, data):
    finder = LearningRateFinder(**options)
    with pytest.warns(UserWarning, match="found no rate from .* training starts with lr=0.123"):
        module, _ = fit(problem, seed, finder, **data)

    assert finder.suggestion is None
    assert module.lr == 0.123
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.123


def rates(count):
    return [1e-8 * 1.2**number for number in range(count)]


def test_noise_alone_has_no_slope():
    found = 0
    for seed in range(200):
        count = (30, 60, 100)[seed % 3]
        losses = 1 + 0.3 * torch.randn(count, generator=torch.Generator().manual_seed(seed))
        found += steepest(rates(count), losses.tolist()) is not None
    assert found <= 2


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_steepest_descent_is_found_under_noise(noise):
    """A loss that falls around step 60 and rises from step 80 on."""
    steps = torch.arange(100.0)
    curve = 2 - torch.sigmoid((steps - 60) / 4) + torch.relu(steps - 80) ** 2 / 50
    for seed in range(20):
        shaken = curve + noise * torch.randn(100, generator=torch.Generator().manual_seed(seed))
        found = rates(100).index(steepest(rates(100), shaken.tolist()))
        assert abs(found - 60) <= 7


@pytest.mark.parametrize(
    "losses", [[], [1.0] * 9, [1.0] * 50, list(range(50)), [float(2**n) for n in range(50)]], ids=len
)
def test_a_curve_that_never_falls_has_no_slope(losses):
    assert steepest(rates(len(losses)), losses) is None


def test_the_state_of_plugins_is_as_before_the_search():
    class Watched(sg.callbacks.Callback):
        @sg.hookimpl
        def on_train_start(self, run):
            self.scaler = run.stack.precision.plugin.state_dict()

    watched, module = Watched(), Problem(nn.Linear(4, 1), torch.optim.SGD)
    callbacks = [LearningRateFinder(num_training_steps=20), watched]
    sg.Trainer(max_steps=1, callbacks=callbacks, precision="16-mixed", **QUIET).fit(module, regression(0))

    assert watched.scaler["_growth_tracker"] == 0
