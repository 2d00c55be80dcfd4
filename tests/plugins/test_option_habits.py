"""Options of torch's DDP and FSDP in the forms that torch and Lightning have for them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

import stratagem as sg
from stratagem.strategies import DDPStrategy, FSDPStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
    "num_sanity_val_steps": 0,
}  # fmt: skip
BATCHES = joined_batches(3, 24)


class Normalized(Net):
    """Has running statistics; the ranks see different batches."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(self.net[0].in_features), *self.net)
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.net[0].running_mean.clone())


def buffers_under(rank, world_size, options):
    trainer = sg.Trainer(strategy=DDPStrategy(**options), devices=world_size, **QUIET)
    module = Normalized()
    trainer.fit(module, share(trainer, BATCHES), share(trainer, BATCHES[:1]))
    return module.seen[0], [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_sent_unless_they_are_not_to_be(broadcast_buffers):
    one, other = run_in_processes(buffers_under, 2, {"broadcast_buffers": broadcast_buffers})

    assert torch.equal(one[0], other[0]) == broadcast_buffers
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


class OfRank(Net):
    def __init__(self, rank):
        super().__init__()
        with torch.no_grad():
            self.net[-1].bias.fill_(float(rank))


def weights_under(rank, world_size, options):
    trainer = sg.Trainer(strategy=DDPStrategy(**options), devices=world_size, **QUIET, max_steps=1)
    module = OfRank(rank)
    trainer.fit(module, share(trainer, BATCHES))
    return module.net[-1].bias.detach()


@pytest.mark.parametrize("init_sync", [True, False])
def test_first_values_are_sent_unless_they_are_not_to_be(init_sync):
    one, other = run_in_processes(weights_under, 2, {"init_sync": init_sync})

    assert torch.equal(one, other) == init_sync


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (CPUOffload(offload_params=True), True),
        (CPUOffload(offload_params=False), False),
        (CPUOffloadPolicy(pin_memory=False), True),
        (OffloadPolicy(), False),
        (True, True),
    ],
    ids=str,
)
def test_offloading_is_told_as_torch_tells_it(given, kept):
    strategy = FSDPStrategy(cpu_offload=given)
    sg.Trainer(strategy=strategy, devices=2, **QUIET)

    assert strategy.cpu_offload is kept


@pytest.mark.parametrize("given", [*ShardingStrategy])
def test_sharding_is_told_as_torch_tells_it(given):
    strategy = FSDPStrategy(sharding_strategy=given)
    sg.Trainer(strategy=strategy, devices=2, **QUIET)

    assert strategy.sharding_strategy == given.name


def trained_under(rank, world_size, options):
    trainer = sg.Trainer(
        strategy={"name": "fsdp", "auto_wrap_policy": {torch.nn.Linear}} | options, devices=world_size, **QUIET,
        gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, BATCHES))
    return weights_of(trainer)


@pytest.mark.every_push("ZERO2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"sharding_strategy": "HYBRID_SHARD"}),
        (2, {"sharding_strategy": "_HYBRID_SHARD_ZERO2"}),
        (4, {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (2, 2)}),
    ],
    ids=["HYBRID_SHARD", "ZERO2", "ZERO2 on a mesh"],
)
def test_hybrid_sharding_trains_as_one_process(world_size, options):
    expected, norms = train_module_plainly(Net(), BATCHES, 1, 0.5)

    assert max(norms) > 1
    for found in run_in_processes(trained_under, world_size, options):
        assert relative_difference(found, expected) < 1e-6
