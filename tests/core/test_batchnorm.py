"""Batch normalization over all ranks computes what one process computes on the joined batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.batchnorm import synchronize
from stratagem.errors import ConfigError
from stratagem.testing import run_in_processes
from stratagem.testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem.testing.training import share, weights_of
from stratagem.world import Collectives

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 24)


class Normalized(Net):
    def __init__(self, momentum=0.1, affine=True):
        super().__init__()
        first, *rest = self.net
        self.net = nn.Sequential(first, nn.BatchNorm1d(first.out_features, momentum=momentum, affine=affine), *rest)


def _train(rank, world_size, strategy, options):
    module = Normalized(**options)
    trainer = sg.Trainer(strategy=strategy, devices=world_size, sync_batchnorm=True, max_epochs=1, **QUIET)
    trainer.fit(module, share(trainer, BATCHES))
    return weights_of(trainer)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_sharded"])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_it_trains_as_one_process(strategy, options):
    plain, norms = train_module_plainly(Normalized(**options), BATCHES)
    assert max(norms) > 1
    for weights in run_in_processes(_train, 3 if strategy == "ddp" else 2, strategy, options):
        assert relative_difference(weights, plain) < 1e-5


def _layers(rank, world_size):
    """Return, for each layer, the largest differences of output, gradients and statistics from the joined batch's."""
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    run.connect()
    worst = {}
    shapes = {nn.BatchNorm1d: (8, 3), nn.BatchNorm2d: (8, 3, 5, 4), nn.BatchNorm3d: (8, 3, 2, 3, 2)}
    for kind, shape in shapes.items():
        torch.manual_seed(5)
        layer = kind(3)
        x, upstream = (torch.randn(shape, dtype=torch.float64) * 3 + 2 for _ in range(2))
        nn.init.normal_(layer.weight)
        layer.double()
        plain, mine = copy.deepcopy(layer), copy.deepcopy(layer)
        assert synchronize(mine, run.collectives) == 1
        assert isinstance(mine, type(layer))
        whole, part = x.clone().requires_grad_(), x.chunk(world_size)[rank].clone().requires_grad_()
        plain(whole).backward(upstream)
        y = mine(part)
        y.backward(upstream.chunk(world_size)[rank])
        for parameter in mine.parameters():
            parameter.grad = run.collectives.all_reduce(parameter.grad, "sum")
        pairs = [
            (part.grad, whole.grad.chunk(world_size)[rank]), (mine.running_mean, plain.running_mean),
            (mine.running_var, plain.running_var), (mine.weight.grad, plain.weight.grad), (mine.bias.grad, plain.bias.grad),
        ]  # fmt: skip
        worst[type(layer).__name__] = max(float((a - b).abs().max()) for a, b in pairs)
    run.close()
    return worst


def test_gradients_and_statistics_are_the_joined_batchs():
    for worst in run_in_processes(_layers, 2):
        assert len(worst) == 3
        assert max(worst.values()) < 1e-10


def test_without_other_ranks_a_layer_is_the_ordinary_one():
    layer = nn.BatchNorm1d(3)
    plain = copy.deepcopy(layer)
    synchronize(layer, Collectives())
    x = torch.randn(8, 3)

    assert torch.equal(layer(x), plain(x))
    assert type(pickle.loads(pickle.dumps(layer))) is nn.BatchNorm1d
    assert type(copy.deepcopy(layer)) is nn.BatchNorm1d


def _without_layers(rank, world_size):
    with pytest.raises(ConfigError, match="sync_batchnorm is True and Net has no batch normalization"):
        sg.Trainer(strategy="ddp", devices=world_size, sync_batchnorm=True, **QUIET).fit(Net(), BATCHES)
    return True


def test_a_model_without_any_is_told():
    assert run_in_processes(_without_layers, 2) == [True, True]
