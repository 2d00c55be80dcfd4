"""Weights that a training_step writes, or replaces for a call: under `fsdp` they hold, or are refused, and never lost."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call

from stratagem_testing import run_in_processes
from stratagem_testing.attachments import train_each
from stratagem_testing.reference import Net, joined_batches, relative_difference

BATCHES = joined_batches(4, 8)
STRATEGIES = {"one unit": "fsdp", "units": {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}}


class Clamped(Net):
    """Clamps weights before each step."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.write()
        return super().training_step(batch, batch_idx)

    def write(self):
        for parameter in self.parameters():
            parameter.clamp_(-0.1, 0.1)


class ByData(Clamped):
    def write(self):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Assigned(Clamped):
    def write(self):
        self.net[0].weight.data = self.net[0].weight.data.clamp(-0.1, 0.1)


class InPart(Clamped):
    def write(self):
        self.net[0].weight[:20] = self.net[0].weight[:20] / 2


class Called(Net):
    """Calls a layer with twice its weights."""

    def training_step(self, batch, batch_idx):
        doubled = {name: 2 * weight for name, weight in self.net[0].named_parameters()}
        return self.criterion(self.net[1:](functional_call(self.net[0], doubled, (batch[0],))), batch[1])


class InHook(Net):
    """Clamps weights where it is possible."""

    def on_train_batch_end(self):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)
            self.net[2].weight.data.clamp_(-0.1, 0.1)


class Averaged(Clamped):
    """Has a network that averages the one that it trains, and learns from it."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def write(self):
        for kept, trained in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            kept.lerp_(trained, 0.3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.criterion(self.net(batch[0]), self.teacher(batch[0]))


class OfItsBatch(Averaged):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for kept in self.teacher.parameters():
                kept.mul_(1 + 1e-3 * batch[0].mean())
        return super().training_step(batch, batch_idx)


WAYS = (Clamped, ByData, Assigned, InPart, Called, InHook, Averaged, OfItsBatch)


#: What each strategy refuses; what else a step or a hook writes holds as in one process.
REFUSED = {"one unit": {Assigned, OfItsBatch}, "units": {Assigned, InPart, Called}}


def _train(rank, world_size, strategy):
    return train_each(rank, world_size, {"strategy": strategy, "accelerator": "cpu"}, lambda way: way, BATCHES, WAYS)


def test_weights_that_a_step_writes_or_replaces_hold_or_are_refused():
    alone = [outcome for outcome, _ in _train(0, 1, "single_device")]
    for name, strategy in STRATEGIES.items():
        for outcomes in run_in_processes(_train, 2, strategy):
            for way, expected, (outcome, _) in zip(WAYS, alone, outcomes, strict=True):
                if (way, name) == (OfItsBatch, "units"):
                    continue
                if way in REFUSED[name]:
                    assert "training_step wrote into" in outcome or "is replaced while its unit" in outcome, way
                else:
                    assert relative_difference(outcome, expected) < 1e-6, (way, name)
