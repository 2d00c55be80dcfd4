"""FSDP: steps that use parameters outside of the ordinary forward and backward of their unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import joined_batches, relative_difference
from stratagem_testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(16, width)

    def forward(self, x):
        return F.softplus(self.linear(x))


class Slopes(nn.Module):
    """Returns the slope of what it computes, as models of forces do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.second(F.softplus(self.first(x)))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.first(slope) * energy


class Model(sg.Module):
    """Two units, and parameters of the root's that are used before and after a backward within the step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.shift, self.head = nn.Parameter(torch.randn(16) / 4), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.blocks(x + self.shift) + self.shift)

    def loss(self, x, y):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Penalty(Model):
    def loss(self, x, y):
        x = x.detach().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return 30 * (F.mse_loss(out, y) + slope.square().mean() + F.mse_loss(self(-x), y))


class PenaltyAlone(Model):
    """The loss reaches the first forward by its slope only, and the last block's gradients come late."""

    def loss(self, x, y):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return 30 * (slope.square().mean() + F.mse_loss(self(-x), y))


class Attacked(Model):
    """Trained on inputs that were moved along their gradient; nothing differentiates that twice."""

    def loss(self, x, y):
        x = x.detach().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(F.mse_loss(out, y), x, retain_graph=True)
        return 30 * (F.mse_loss(self(x.detach() + 0.1 * slope.sign()), y) + F.mse_loss(out, y))


class Forces(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(16), Slopes())

    def loss(self, x, y):
        return 30 * F.mse_loss(self(x), y)


class ByHand(Penalty):
    """Steps twice for each batch, on its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for x in (batch[0], -batch[0]):
            self.manual_backward(self.loss(x, batch[1]))
            optimizer.step()
            optimizer.zero_grad()


MODELS = (Penalty, PenaltyAlone, Attacked, Forces, ByHand)
OPTIONS = (
    {},
    {"auto_wrap_policy": {Block}},
    {"auto_wrap_policy": {nn.Linear}},
    {"auto_wrap_policy": {Block}, "sharding_strategy": "SHARD_GRAD_OP"},
    {"auto_wrap_policy": {Block}, "sharding_strategy": "NO_SHARD"},
)


def _plainly(model, batches, accumulate):
    optimizer = model.configure_optimizers()
    norms = []
    for index, (x, y) in enumerate(batches):
        for inputs in (x, -x) if isinstance(model, ByHand) else (x,):
            (model.loss(inputs, y) / accumulate).backward()
            if (index + 1) % accumulate == 0:
                norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
                optimizer.step()
                optimizer.zero_grad()
    assert max(norms) > 1, "a small gradient proves nothing"
    return model.state_dict()


def _fit(world_size, options, model, batches, accumulate=1):
    if isinstance(model, Forces) and options.get("auto_wrap_policy") == {Block}:
        options = options | {"auto_wrap_policy": {Block, Slopes}}
    trainer = sg.Trainer(
        strategy={"name": "fsdp", **options}, devices=world_size, max_epochs=1, accumulate_grad_batches=accumulate,
        **QUIET,
    )  # fmt: skip
    trainer.fit(model, share(trainer, batches))
    return weights_of(trainer)


def _trained(rank, world_size, options, accumulate):
    batches, found = joined_batches(4, 24), {}
    for model in MODELS:
        if accumulate > 1 and model is ByHand:
            continue
        said = outcome(
            lambda model=model: found.update({model: _fit(world_size, options, model(), batches, accumulate)})
        )
        if said != "nothing":
            found[model] = said
    return found


@pytest.mark.every_push(
    "{'auto_wrap_policy': {<class 'tests.plugins.test_fsdp_parameters_in_use.Block'>}, 'sharding_strategy': 'NO_SHARD'}-2"
)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_backward_within_the_step_is_right(options, accumulate):
    results = run_in_processes(_trained, 2, options, accumulate)

    for model in results[0]:
        expected = _plainly(model(), joined_batches(4, 24), accumulate)
        for found in results:
            assert not isinstance(found[model], str), f"{model.__name__}: {found[model]}"
            assert relative_difference(found[model], expected) < 1e-5, model.__name__


# --- Parameters of another unit ----------------------------------------------------------------------------------


class UsesItsWeight(Model):
    def forward(self, x):
        return F.linear(self.blocks(x), self.head.weight)

    def loss(self, x, y):
        return F.mse_loss(self(x), y)


class TiesByHand(Model):
    def forward(self, x):
        return F.linear(self.blocks(x), self.blocks[0].linear.weight).sum(1, keepdim=True)

    loss = UsesItsWeight.loss


class AddsDecay(Model):
    def loss(self, x, y):
        return 30 * F.mse_loss(self(x), y) + 3 * sum(p.square().sum() for p in self.parameters())


def _outcomes(rank, world_size):
    options = {"auto_wrap_policy": {nn.Linear}}
    return [
        outcome(lambda model=model: _fit(world_size, options, model(), joined_batches(2, 24)))
        for model in (UsesItsWeight, TiesByHand, AddsDecay)
    ]


@pytest.mark.slow
@pytest.mark.every_push("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_used_outside_of_their_unit_are_refused_by_name(world_size):
    for used, tied, added in run_in_processes(_outcomes, world_size):
        assert used.startswith("refused: 'head.weight' of the unit 'head' was used while sharded, outside of"), used
        assert tied.startswith("refused: 'blocks.0.linear.weight' of the unit 'blocks.0.linear' was used"), tied
        assert added.startswith("refused: some of 'blocks.0.linear.bias', 'blocks.0.linear.weight', "), added


class Attention(Model):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, bias=False, batch_first=True)

    def forward(self, x):
        x = self.blocks(x)[:, None]
        return self.head(self.attention(x, x, x)[0][:, 0])

    def loss(self, x, y):
        return 30 * F.mse_loss(self(x), y)


def _with_attention(rank, world_size, policy):
    return _fit(world_size, {"auto_wrap_policy": policy}, Attention(), joined_batches(4, 24))


@pytest.mark.slow
@pytest.mark.every_push("linear")
@pytest.mark.parametrize("policy", [{nn.Linear}, {nn.MultiheadAttention, nn.Linear}], ids=["linear", "and attention"])
def test_attention_is_sharded_as_a_whole(policy):
    results = run_in_processes(_with_attention, 2, policy)

    expected = _plainly(Attention(), joined_batches(4, 24), 1)
    for weights in results:
        assert relative_difference(weights, expected) < 1e-5
