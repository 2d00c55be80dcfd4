"""A parameter that gets two gradients in one backward trains as in one process, or is refused."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET, share, weights_of

BATCHES = joined_batches(4, 8)
REFUSED = "got a second gradient in one backward"


class Twice(Net):
    """The second layer is in two reentrant checkpoints."""

    def __init__(self):
        super().__init__()
        first = self.net[0]
        self.first, self.second, self.last = (
            first,
            nn.Linear(len(first.bias), len(first.bias)),
            nn.Linear(len(first.bias), 1),
        )
        del self.net

    def forward(self, x):
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(lambda value: torch.tanh(self.second(value)), hidden, use_reentrant=True)
        return self.last(hidden)


class ByHand(Twice):
    automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, 0))
        optimizer.step()


#: What trains a module, and which of the modules it refuses.
STRATEGIES = (
    ("ddp", (Twice, ByHand)), ({"name": "ddp", "static_graph": True}, (ByHand,)),
    ({"name": "parallel", "replicate": 2}, (Twice, ByHand)), ("ddp_sharded", ()), ("fsdp", (ByHand,)),
    ({"name": "fsdp", "auto_wrap_policy": {nn.Linear}}, (Twice, ByHand)),
)  # fmt: skip


def _train(rank, world_size, make):
    outcomes = []
    for strategy, _ in STRATEGIES:
        for way in (Twice, ByHand):
            trainer = sg.Trainer(**QUIET, strategy=strategy, devices=world_size, accelerator="cpu")
            try:
                trainer.fit(make(way), share(trainer, BATCHES))
                outcomes.append(weights_of(trainer))
            except ConfigError as error:
                outcomes.append(str(error))
            finally:
                trainer.run.close()
    return outcomes


def _made(way):
    torch.manual_seed(0)
    return way()


def test_a_layer_in_two_reentrant_checkpoints_trains_as_in_one_process_or_is_refused():
    expected, _ = train_module_plainly(_made(Twice), BATCHES)

    for outcomes in run_in_processes(_train, 2, _made):
        found = iter(outcomes)
        for strategy, refused in STRATEGIES:
            for way in (Twice, ByHand):
                outcome = next(found)
                if way in refused:
                    assert isinstance(outcome, str), (strategy, way)
                    assert REFUSED in outcome or "static_graph" in outcome
                else:
                    assert relative_difference(outcome, expected) < 1e-6, (strategy, way)
