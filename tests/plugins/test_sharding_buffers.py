"""Messages of sharded units reuse memory on the CPU, and have the values that FSDP2 alone has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import stratagem as sg
from stratagem_sharding.buffers import BufferPool
from stratagem_testing import run_in_processes

CPU, WIDTH, STEPS = torch.device("cpu"), 600, 3


def test_a_buffer_is_reused_when_no_view_of_it_is_left():
    pool = BufferPool()
    first = pool.empty((500_000,), dtype=torch.float32, device=CPU)
    view, address = first.narrow(0, 10, 20), first.data_ptr()
    del first

    assert pool.empty((500_000,), dtype=torch.float32, device=CPU).data_ptr() != address
    del view
    assert address in {pool.empty((500_000,), dtype=torch.bfloat16, device=CPU).data_ptr() for _ in range(2)} | {
        pool.empty((500_000,), dtype=torch.float32, device=CPU).data_ptr()
    }


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 1))


def batch_of(rank: int) -> torch.Tensor:
    return 5 * torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))


class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.net, self.losses = network(), []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def by_trainer(rank, world_size):
    model = Model()
    strategy = {"name": "fsdp", "auto_wrap_policy": {nn.Sequential}}
    trainer = sg.Trainer(strategy=strategy, devices=world_size, accelerator="cpu", max_epochs=1, barebones=True)
    trainer.fit(model, [batch_of(rank)] * STEPS)
    trainer.close()
    return model.losses


def by_hand(rank, world_size):
    dist.init_process_group("gloo")
    model, losses = network(), []
    for layer in list(model)[:-1]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = model(batch_of(rank)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_of_units_of_a_megabyte_have_the_bits_of_fsdp2_alone(world_size):
    assert run_in_processes(by_trainer, world_size) == run_in_processes(by_hand, world_size)
