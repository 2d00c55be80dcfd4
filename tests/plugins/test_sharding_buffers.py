"""Messages of sharded units reuse memory on the CPU, and have the values that FSDP2 alone has."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import stratagem as sg
from stratagem.api.traffic import Traffic
from stratagem_sharding.memory import BufferPool
from stratagem_sharding.traffic import CountingReduceScatter
from stratagem_testing import run_in_processes
from stratagem_testing.processes import ProcessesFailed

CPU, WIDTH, STEPS = torch.device("cpu"), 600, 3


def test_a_buffer_is_reused_when_no_view_of_it_is_left():
    pool = BufferPool(most=4)
    first = pool.empty((500_000,), dtype=torch.float32, device=CPU)
    view, address = first.narrow(0, 10, 20), first.data_ptr()
    del first

    assert pool.empty((500_000,), dtype=torch.float32, device=CPU).data_ptr() != address
    del view
    assert address in {pool.empty((500_000,), dtype=torch.bfloat16, device=CPU).data_ptr() for _ in range(2)} | {
        pool.empty((500_000,), dtype=torch.float32, device=CPU).data_ptr()
    }


def test_free_buffers_are_dropped_and_used_ones_kept():
    pool = BufferPool(most=math.inf)
    used, free = (pool.empty((500_000,), dtype=torch.float32, device=CPU) for _ in range(2))
    address = used.data_ptr()
    del free
    pool.drop_free()

    assert [each.data_ptr() for each in pool._buffers] == [address]


def test_a_buffer_is_not_reused_while_its_storage_is_kept():
    pool = BufferPool(most=4)
    storage = pool.empty((500_000,), dtype=torch.float32, device=CPU).untyped_storage()

    assert pool.empty((500_000,), dtype=torch.float32, device=CPU).data_ptr() != storage.data_ptr()


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


def by_trainer(rank, world_size, make=Model, **strategy):
    model, chosen = make(), {"name": "fsdp", "auto_wrap_policy": {nn.Sequential}} | strategy
    trainer = sg.Trainer(strategy=chosen, devices=world_size, accelerator="cpu", max_epochs=1, barebones=True)
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


def reduced(rank, world_size, op, length, dtype=torch.float32):
    """Return what stratagem and gloo reduce the same values to, and how many bytes were counted."""
    dist.init_process_group("gloo")
    values = 9 * torch.randn(world_size * length, generator=torch.Generator().manual_seed(rank)).to(dtype)
    traffic, results = Traffic(), []
    pools = BufferPool(most=4), BufferPool(most=4)
    for reduce in (CountingReduceScatter(traffic, *pools), DefaultReduceScatter()):
        message = reduce.allocate(values.shape, dtype=values.dtype, device=CPU).copy_(values)
        output = reduce.allocate((length,), dtype=values.dtype, device=CPU)
        reduce(output, message, dist.group.WORLD, op=getattr(dist.ReduceOp, op))
        results.append(output.clone())
    return torch.equal(*results), results[0].norm().item() > 1, traffic.counts["reduce_scatter", "gradients"].payload


# Below and above what is exchanged directly; of a length that gloo does not divide as FSDP2 does.
@pytest.mark.every_push("2-AVG-300000")
@pytest.mark.parametrize("length", [7, 300_000, 1_234_567])
@pytest.mark.parametrize(("world_size", "op"), [(2, "AVG"), (2, "SUM"), (3, "AVG"), (4, "SUM"), (5, "AVG")])
def test_gradients_are_reduced_to_the_bits_of_gloo(world_size, op, length):
    expected = (True, True, world_size * length * 4)
    assert run_in_processes(reduced, world_size, op, length) == [expected] * world_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_are_reduced_to_the_bits_of_gloo(dtype):
    assert run_in_processes(reduced, 3, "AVG", 600_000, dtype) == [(True, True, 3 * 600_000 * 2)] * 3


@pytest.mark.slow
def test_an_operation_that_gloo_does_not_have_is_its_error():
    with pytest.raises(ProcessesFailed, match=r"ReduceOp\.BAND"):
        run_in_processes(reduced, 2, "BAND", 300_000)


@pytest.mark.slow
@pytest.mark.every_push("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_of_units_of_a_megabyte_have_the_bits_of_fsdp2_alone(world_size):
    assert run_in_processes(by_trainer, world_size) == run_in_processes(by_hand, world_size)


class Sends(Model):
    """Sends messages of its own between ranks, while FSDP gathers its parts."""

    def training_step(self, batch, batch_idx):
        other, received = 1 - dist.get_rank(), torch.zeros(3)
        receiving = dist.irecv(received, src=other)
        loss = self.net(batch).square().mean()
        sending = dist.isend(torch.full((3,), 10.0 + dist.get_rank()), dst=other)
        sending.wait()
        receiving.wait()
        self.losses.append(received.tolist())
        return loss


@pytest.mark.slow
def test_messages_of_a_users_own_are_not_taken_for_those_of_units():
    assert run_in_processes(by_trainer, 2, Sends) == [[[11.0] * 3] * STEPS, [[10.0] * 3] * STEPS]


def by_parallel(rank, world_size):
    return by_trainer(rank, world_size, name="parallel", shard=world_size)


@pytest.mark.slow
def test_losses_of_a_mesh_that_shards_have_the_bits_of_fsdp2_alone():
    assert run_in_processes(by_parallel, 2) == run_in_processes(by_hand, 2)
