"""What hooks write into a part of a gradient or a weight is written under every strategy that cuts tensors."""

from __future__ import annotations

import contextlib

import pytest
import torch

from stratagem_testing import run_in_processes
from stratagem_testing.attachments import train_each
from stratagem_testing.reference import Net, joined_batches, relative_difference

BATCHES = joined_batches(4, 12)


def diffusers(tensor):
    chosen = torch.tensor([True, False] * (len(tensor) // 2))
    tensor.data[chosen, :] = tensor.data[chosen, :].fill_(0.25)


def of_a_part(tensor):
    part = tensor[2:20]
    part[3][1] = 0.5
    part[:, 4].mul_(2)
    part[0:2] += 0.125


def compared(tensor):
    """Change nothing, though the name of the operator, __eq__, ends as those that change a tensor."""
    with contextlib.suppress(RuntimeError):  # torch does not compare shards with a whole tensor
        assert (tensor == torch.zeros(tensor.shape)).dtype == torch.bool


def again(tensor):
    part, other = tensor[0], tensor[0:3]
    tensor.mul_(0.5)
    part.add_(0.25)
    other.mul_(0.5)


#: Each changes a tensor of shape (32, 16) or (32, 32) in place.
WAYS = {
    "row": lambda tensor: tensor.__setitem__(0, 0.0),
    "rows": lambda tensor: tensor.__setitem__(slice(3, 21), torch.arange(18.0)[:, None] / 100),
    "column": lambda tensor: tensor.__setitem__((slice(None), -1), 0.25),
    "element": lambda tensor: tensor.__setitem__((31, 1), tensor[0, 0] * 2),
    "mask": lambda tensor: tensor.__setitem__(torch.arange(tensor.numel()).view(tensor.shape) % 3 == 0, 0.0),
    "rows of a list": lambda tensor: tensor[[0, 2]].zero_(),  # a copy: nothing changes
    "views": lambda tensor: (tensor[0:4].T[0].fill_(0.5), tensor[9].view(-1)[0].zero_(), tensor.T[3].zero_()),
    "foreach": lambda tensor: torch._foreach_mul_([tensor[0], tensor[5]], 0.5),
    "out": lambda tensor: torch.clamp(tensor[3], -0.01, 0.01, out=tensor[4]),
    "again": again,
    "copy_": lambda tensor: (
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) / 999),
        tensor[1].copy_(tensor[2]),
    ),
    "index_fill_": lambda tensor: tensor.index_fill_(0, torch.tensor([1, 30]), 0.5),
    "index_put_": lambda tensor: tensor.index_put_((torch.tensor([0, 31]), torch.tensor([1, 2])), torch.tensor(0.5)),
    "index_add_": lambda tensor: tensor.index_add_(0, torch.tensor([2]), 0.1 * tensor[5:6]),
    "lerp_": lambda tensor: tensor[3:9].lerp_(torch.ones(6, 1), weight=0.5),
    "init": lambda tensor: (torch.manual_seed(5), torch.nn.init.xavier_uniform_(tensor, 0.1)),
    "init by name": lambda tensor: (torch.manual_seed(6), torch.nn.init.normal_(tensor, std=0.01)),
    "orthogonal": lambda tensor: (torch.manual_seed(7), torch.nn.init.orthogonal_(tensor, 0.1)),
    "random row": lambda tensor: (torch.manual_seed(8), tensor[3].uniform_(-0.1, 0.1)),
    "own mask": lambda tensor: tensor.__setitem__(tensor.abs() > 0.1, 0.0),
    "comparison": compared,
    "list": lambda tensor: tensor.__setitem__([1, 5, 30], tensor[[2, 6, 31]]),
    "zero_": lambda tensor: tensor[7].zero_(),
    "data": lambda tensor: tensor.data[:5].mul_(3),
    "diffusers": diffusers,
    "of a part": of_a_part,
    "whole": lambda tensor: tensor.mul_(0.5),
}


class Writes(Net):
    """Changes the first weight's gradient before each step, and the second weight after it."""

    way = ""

    def on_before_optimizer_step(self, optimizer):
        WAYS[self.way](self.net[0].weight.grad)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            WAYS[self.way](self.net[2].weight)


MODELS = [type(f"Writes{number}", (Writes,), {"way": way}) for number, way in enumerate(WAYS)]


def plainly(model):
    """Return the weights after training in plain PyTorch."""
    optimizer = model.configure_optimizers()
    for x, y in BATCHES:
        model.criterion(model(x), y).backward()
        model.on_before_optimizer_step(optimizer)
        optimizer.step()
        model.on_train_batch_end(None, (x, y), 0)
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.when_changed(
    "plugins/fsdp/",
    "plugins/libraries/",
    guard="tests/parity/test_writes_into_parts.py::test_what_the_step_writes_is_as_in_plain_pytorch",
)
@pytest.mark.when_changed("plugins/parallel/", "plugins/parallel_unchanged/", cases=("tensor",))
@pytest.mark.every_push("fsdp", "tensor")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        pytest.param(2, "ddp", id="ddp"), pytest.param(3, "fsdp", id="fsdp"),
        pytest.param(2, {"name": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"}, id="SHARD_GRAD_OP"),
        pytest.param(2, {"name": "parallel", "shard": 2}, id="shard"),
        pytest.param(2, {"name": "parallel", "tensor": 2}, id="tensor"),
        pytest.param(4, {"name": "parallel", "shard": 2, "tensor": 2}, id="shard and tensor"),
        pytest.param(4, {"name": "parallel", "shard": 2, "replicate": 2}, id="shard and replicate"),
    ],
)  # fmt: skip
def test_it_is_as_in_plain_pytorch(size, strategy):
    expected = [plainly(model()) for model in MODELS]
    choose = {"strategy": strategy, "accelerator": "cpu"}
    for found in run_in_processes(train_each, size, choose, lambda module: module, BATCHES, MODELS):
        for (outcome, _), weights, way in zip(found, expected, WAYS, strict=True):
            assert not isinstance(outcome, str), (way, outcome)
            assert relative_difference(outcome, weights) < 1e-6, way


class WritesInTheStep(Net):
    def training_step(self, batch, batch_idx):
        assert torch._C._len_torch_function_stack() == 0, "it could not be compiled"
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        WAYS["again"](self.net[0].weight.grad)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            WAYS["again"](self.net[2].weight)


@pytest.mark.slow
def test_what_the_step_writes_is_as_in_plain_pytorch():
    expected = plainly(type("Again", (Writes,), {"way": "again"})())
    choose = {"strategy": "fsdp", "accelerator": "cpu"}
    for ((weights, _),) in run_in_processes(train_each, 2, choose, _same, BATCHES, [WritesInTheStep]):
        assert relative_difference(weights, expected) < 1e-6


REFUSED = {
    "narrow": lambda tensor: tensor.narrow(0, 0, 2).zero_(),
    "chunk": lambda tensor: [each.zero_() for each in tensor.chunk(3)],
    "data": lambda tensor: setattr(tensor, "data", tensor.data * 0.5),
}


class Refused(Net):
    way = ""

    def on_train_epoch_end(self):
        with torch.no_grad():
            REFUSED[self.way](self.net[2].weight)


class RefusedInTheStep(Net):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[2].weight[:2].mul_(0.5)
        return super().training_step(batch, batch_idx)


class Computes(Net):
    def on_train_epoch_end(self):
        torch.nn.functional.linear(BATCHES[0][0], self.net[0].weight)


@pytest.mark.slow
def test_what_would_be_lost_is_refused_and_what_is_not_gathered():
    models = [type(f"Refused{number}", (Refused,), {"way": way}) for number, way in enumerate(REFUSED)]
    choose = {"strategy": {"name": "fsdp", "auto_wrap_policy": {torch.nn.Linear}}, "accelerator": "cpu"}
    models += [RefusedInTheStep, Computes]
    words_of = {"Computes": "uses sharded weights", "in the step": "a part of a sharded weight, which would be lost"}
    for found in run_in_processes(train_each, 2, choose, _same, BATCHES, models):
        for (outcome, _), way in zip(found, [*REFUSED, "in the step", "Computes"], strict=True):
            assert isinstance(outcome, str), way
            words = words_of.get(way, "a sharded tensor")
            assert words in outcome, (way, outcome)


def _same(module):
    return module
