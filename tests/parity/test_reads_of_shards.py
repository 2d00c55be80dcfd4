"""What hooks compute of a sharded tensor as a number is that of the whole tensor, on every rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem_testing import ProcessesFailed, run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference
from stratagem_testing.training import QUIET, share, train

BATCHES = joined_batches(2, 12)

#: Each makes a number of a tensor of shape (32, 32).
READS = {
    "norm": lambda tensor: tensor.norm().item(),
    "float": lambda tensor: float(tensor.sum()),
    "mean": lambda tensor: tensor.mean().item(),
    "std": lambda tensor: tensor.std().item(),
    "largest": lambda tensor: tensor.abs().max().item(),
    "smallest": lambda tensor: float(tensor.min()),
    "int": lambda tensor: int((tensor > 0).sum()),
    "bool": lambda tensor: [bool((tensor > limit).any()) for limit in (0.0, 0.176, 9.0)],
    "all": lambda tensor: bool((tensor.abs() < 0.178).all()),
    "math": lambda tensor: math.sqrt(tensor.pow(2).sum()),
    "column": lambda tensor: tensor.sum(0)[3].item(),
    "row": lambda tensor: tensor.norm(dim=1)[-1].item(),
    "element": lambda tensor: tensor[3, 4].item(),
    "view": lambda tensor: tensor.view(-1).sum().item(),
    "product": lambda tensor: (tensor.T @ tensor).trace().item(),
    "sum of norms": lambda tensor: sum(each.norm(2).item() ** 2 for each in (tensor, tensor)) ** 0.5,
    "total norm": lambda tensor: float(torch.nn.utils.get_total_norm([tensor, tensor])),
    "on the CPU": lambda tensor: tensor.detach().double().sum().cpu().item(),
    "number and tensor": lambda tensor: (tensor.sum() + 1.0).item(),
    "text": lambda tensor: f"{tensor.sum():.3f}",
    "list": lambda tensor: sum(tensor.flatten().tolist()),
    "numpy": lambda tensor: float(np.asarray(tensor.detach()).sum() + tensor.detach().numpy().max()),
    "allclose": lambda tensor: torch.allclose(tensor, tensor.clone()),
    "unique": lambda tensor: len(torch.unique(tensor.sign())),
}


class Reads(Net):
    def on_train_end(self):
        weight = self.net[2].weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.found = {name: (read(weight), read(whole)) for name, read in READS.items()}


def reads(rank, size, strategy):
    model = Reads()
    train(rank, size, lambda: model, BATCHES, {"strategy": strategy, "accelerator": "cpu"})
    return model.found


@pytest.mark.every_push("fsdp", "tensor")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        pytest.param(2, "ddp", id="ddp"), pytest.param(3, "fsdp", id="fsdp"),
        pytest.param(2, {"name": "parallel", "shard": 2}, id="shard"),
        pytest.param(2, {"name": "parallel", "tensor": 2}, id="tensor"),
        pytest.param(4, {"name": "parallel", "shard": 2, "tensor": 2}, id="shard and tensor"),
        pytest.param(4, {"name": "fsdp", "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, id="HYBRID_SHARD"),
    ],
)  # fmt: skip
def test_a_number_is_that_of_the_whole(size, strategy):
    for found in run_in_processes(reads, size, strategy):
        for name, (number, expected) in found.items():
            assert number == (expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-5)), name


class Lars(torch.optim.Optimizer):
    """Scales each step by two norms, and halves it where a gradient has a large element."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        for parameter in (each for group in self.param_groups for each in group["params"]):
            weight, gradient = parameter.norm().item(), float(parameter.grad.norm())
            trust = 0.02 * weight / gradient if weight > 0 else 1.0
            if (parameter.grad.abs() > 0.5).any():
                trust *= 0.5
            parameter.add_(parameter.grad, alpha=-0.1 * trust)
        return loss


class WithLars(Net):
    def configure_optimizers(self):
        return Lars(self.parameters())


class ClipsByHand(WithLars):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.criterion(self(batch[0]), batch[1]))
        clip(self)
        optimizer.step()


def clip(model):
    norm = sum(each.grad.norm().item() ** 2 for each in model.parameters()) ** 0.5
    for each in model.parameters():
        each.grad.mul_(min(1.0, 0.5 / norm))


class ReadsAtTimes(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % 2:
            self.last = self.net[2].weight.norm().item()


def reads_with_two_trainers(rank, size):
    trainers = [sg.Trainer(strategy="fsdp", accelerator="cpu", devices=size, **QUIET) for _ in range(2)]
    models = [ReadsAtTimes(), ReadsAtTimes()]
    found = []
    for trainer, model in [*zip(trainers, models, strict=True), (trainers[0], models[0])]:
        trainer.fit(model, share(trainer, BATCHES * 2))
        found.append((model.last, models[0].net[2].weight.norm().item()))
    return found


@pytest.mark.slow
def test_reads_that_differ_from_step_to_step_and_two_trainers():
    found = run_in_processes(reads_with_two_trainers, 2)
    assert found[0] == found[1]
    for last, after in (found[0][0], found[0][2]):
        assert last == after


@pytest.mark.every_push("WithLars-fsdp", "ClipsByHand-tensor")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", {"name": "parallel", "tensor": 2}], ids=["fsdp", "tensor"])
@pytest.mark.parametrize("make", [WithLars, ClipsByHand])
def test_what_depends_on_numbers_trains_as_in_plain_pytorch(strategy, make):
    model = make()
    optimizer = model.configure_optimizers()
    for x, y in BATCHES:
        optimizer.zero_grad()
        model.criterion(model(x), y).backward()
        if make is ClipsByHand:
            clip(model)
        optimizer.step()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    for found in run_in_processes(train, 2, make, BATCHES, {"strategy": strategy, "accelerator": "cpu"}):
        assert relative_difference(found["weights"], expected) < 1e-6


class ReadsAlone(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0 and batch_idx == 1:
            self.net[2].weight.norm().item()


class ReadsAloneLater(Net):
    """All ranks have read at the same line before."""

    def read(self):
        self.net[2].weight.norm().item()

    def on_train_start(self):
        self.read()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0:
            self.read()


class IndexesAlone(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1:
            print(self.net[2].weight[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("model", [ReadsAlone, ReadsAloneLater, IndexesAlone])
def test_a_rank_that_reads_alone_is_named_with_the_place(model):
    arguments = {"strategy": "fsdp", "accelerator": "cpu"}
    with pytest.raises(ProcessesFailed, match=r"not all ranks read a sharded tensor: rank \d came to .*_shards.py:\d+"):
        run_in_processes(train, 2, model, BATCHES, arguments)
