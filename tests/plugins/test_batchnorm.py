"""Batch normalization over all ranks computes what one process computes on the joined batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from on_device import Both
from torch import nn

import stratagem as sg
from stratagem.api.world import Collectives
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of
from stratagem_transforms import batchnorm
from stratagem_transforms.batchnorm import synchronize

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 24)


class Normalized(Net):
    def __init__(self, momentum=0.1, affine=True):
        super().__init__()
        first, *rest = self.net
        self.net = nn.Sequential(first, nn.BatchNorm1d(first.out_features, momentum=momentum, affine=affine), *rest)


class Convolved(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 1))

    def forward(self, x):
        return x + super().forward(x.unflatten(1, (1, 4, 4))).flatten(1)


class Residual(Net):
    """Of its layers torch's compiler traces what a rank computes, and not what ranks send to each other."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.net = nn.Sequential(Convolved(), Convolved(), self.net)


def _train(rank, world_size, strategy, options):
    found = []
    compiled = [(Residual(), {"compile": {"backend": "aot_eager"}})] if strategy == "ddp_sharded" else []
    for module, more in [(Normalized(**options), {}), *compiled]:
        trainer = sg.Trainer(strategy=strategy, devices=world_size, sync_batchnorm=True, max_epochs=1, **more, **QUIET)
        trainer.fit(module, share(trainer, BATCHES))
        found.append(weights_of(trainer))
    return found


@pytest.mark.slow
@pytest.mark.every_push("{'momentum': None}-ddp_sharded", "{'affine': False}-fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_sharded"])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_it_trains_as_one_process(strategy, options):
    plain, norms = train_module_plainly(Normalized(**options), BATCHES)
    assert max(norms) > 1
    residual, _ = train_module_plainly(Residual(), BATCHES)
    for found in run_in_processes(_train, 3 if strategy == "ddp" else 2, strategy, options):
        for weights, expected in zip(found, (plain, residual), strict=False):
            assert relative_difference(weights, expected) < 1e-5


def _train_twice(rank, world_size, strategy):
    module, batches = Normalized(), [tuple(each[rank::2] for each in batch) for batch in BATCHES]
    for chosen in ({"sync_batchnorm": True}, {}):
        trainer = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=1, **chosen, **QUIET)
        trainer.fit(module, batches)
        if rank == 0 and strategy == "ddp":
            module(BATCHES[0][0])  # needs no other rank
    return type(module.net[1]).__name__


@pytest.mark.slow
@pytest.mark.every_push("ddp-BatchNorm1d")
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "BatchNorm1d"), ("fsdp", "BatchNorm1d")])
def test_after_the_run_each_rank_has_its_own_statistics(strategy, kind):
    assert run_in_processes(_train_twice, 2, strategy, limit_s=60) == [kind, kind]


def _dims(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def _shaped(values, x):
    return values.view(1, -1, *[1] * (x.dim() - 2))


class PretendKernels:
    """What torch's CUDA kernels for batch normalization compute, in plain torch."""

    @staticmethod
    def batch_norm_stats(x, eps):
        return x.mean(_dims(x)), (x.var(_dims(x), correction=0) + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(x, weight, bias, mean, inverse, eps):
        y = (x - _shaped(mean, x)) * _shaped(inverse, x)
        return y if weight is None else y * _shaped(weight, x) + _shaped(bias, x)

    @staticmethod
    def batch_norm_backward_reduce(grad, x, mean, inverse, weight, of_x, of_weight, of_bias):
        sums, by_x = grad.sum(_dims(x)), (grad * (x - _shaped(mean, x))).sum(_dims(x))
        return sums, by_x, by_x * inverse, sums

    @staticmethod
    def batch_norm_backward_elemt(grad, x, mean, inverse, weight, sums, by_x, counts):
        assert counts.dtype == torch.int32
        centered, total = x - _shaped(mean, x), counts.sum()
        grad = grad - _shaped(sums / total, x) - centered * _shaped(inverse.square() * by_x / total, x)
        return grad * _shaped(inverse if weight is None else inverse * weight, x)


def _use_kernels(patch=setattr):
    patch(batchnorm, "_normalization", lambda x: batchnorm._Fused)
    for name in ("batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt"):
        patch(torch, name, getattr(PretendKernels, name))


def _layers(rank, world_size, fused=False):
    """Return, for each layer, the largest differences of output, gradients and statistics from the joined batch's."""
    if fused:
        _use_kernels()
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


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_and_statistics_are_the_joined_batchs(fused):
    for worst in run_in_processes(_layers, 2, fused):
        assert len(worst) == 3
        assert max(worst.values()) < 1e-10


def check_against_the_joined_batch(x, **options):
    """A layer over two ranks that both have `x`, against the ordinary one over both batches."""
    plain = nn.BatchNorm2d(x.shape[1], **options).to(x.device, x.dtype)
    mine = copy.deepcopy(plain)
    synchronize(mine, Both())
    part, joined = x.clone().requires_grad_(), torch.cat([x, x]).requires_grad_()
    y, whole = mine(part), plain(joined)
    y.pow(3).sum().backward()
    whole.pow(3).sum().backward()
    pairs = [
        (y, whole[: len(x)]),
        (part.grad, joined.grad[: len(x)]),
        *zip(mine.buffers(), plain.buffers(), strict=True),
    ]
    pairs += [(2 * a.grad, b.grad) for a, b in zip(mine.parameters(), plain.parameters(), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_kernels_get_what_they_want(monkeypatch, options):
    """Dense tensors (channels-last ones as they are) and whole counts; the numbers are a joined batch's."""
    seen = []

    def normalize(x, *others):
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return PretendKernels.batch_norm_elemt(x, *others)

    _use_kernels(monkeypatch.setattr)
    monkeypatch.setattr(torch, "batch_norm_elemt", normalize)
    x = torch.randn(4, 3, 5, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    check_against_the_joined_batch(x, **options)

    assert seen == [True]


def test_a_rank_without_samples_takes_part(monkeypatch):
    class Empty(Both):
        def all_gather(self, tensor):
            return [torch.tensor([1.0, 2.0, 8.0], dtype=tensor.dtype), tensor]  # mean, variance, count; and ours

        def all_reduce(self, tensor, op="mean"):
            assert not tensor.any()
            return tensor

    monkeypatch.setattr(batchnorm, "_normalization", lambda x: batchnorm._Fused)
    layer = nn.BatchNorm1d(1, momentum=1.0)
    synchronize(layer, Empty())
    x = torch.empty(0, 1, requires_grad=True)
    y = layer(x)
    y.sum().backward()

    assert y.shape == x.grad.shape == (0, 1)
    assert float(layer.running_mean) == pytest.approx(1.0)
    assert float(layer.running_var) == pytest.approx(2.0 * 8 / 7)


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
