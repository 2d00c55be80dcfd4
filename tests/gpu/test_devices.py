"""Batch normalization, batches, random states and switches on a CUDA device."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from on_device import Both
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import stratagem as sg
from stratagem.api.seeding import random_state, restore_random_state, seeded
from stratagem.config.settings import RunSettings
from stratagem.runtime.numerics import switch
from stratagem_copy_stream import CopyStream
from stratagem_transforms.batchnorm import synchronize

pytestmark = pytest.mark.gpu


# --- Batch normalization -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
def test_batch_normalization_over_ranks_is_that_of_the_joined_batch(dtype, memory_format, options):
    x = (torch.randn(8, 5, 6, 4, device="cuda") * 3 + 2).to(dtype, memory_format=memory_format)
    plain = nn.BatchNorm2d(5, **options).to("cuda", torch.promote_types(dtype, torch.float32))
    mine = copy.deepcopy(plain)
    synchronize(mine, Both())
    part, joined = x.clone().requires_grad_(), torch.cat([x, x]).requires_grad_()
    y, whole = mine(part), plain(joined)
    y.float().pow(3).sum().backward()
    whole.float().pow(3).sum().backward()

    tolerance = 1e-4 if dtype.itemsize >= 4 else 5e-2
    pairs = [(y, whole[:8]), (part.grad, joined.grad[:8]), *zip(mine.buffers(), plain.buffers(), strict=True)]
    pairs += [(2 * a.grad, b.grad) for a, b in zip(mine.parameters(), plain.parameters(), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert y.is_contiguous(memory_format=memory_format)


# --- Batches -----------------------------------------------------------------------------------------------------


def test_a_batch_is_copied_while_kernels_of_earlier_ones_run():
    device = torch.device("cuda", torch.cuda.current_device())
    move = CopyStream(device)
    batch = torch.ones(1 << 20).pin_memory()
    before, after = torch.cuda.Event(), torch.cuda.Event()
    move([batch])
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    before.record()
    moved = move([batch])[0]
    after.record(move._stream)
    after.synchronize()

    assert not before.query(), "the copy waited for kernels that were queued before it"
    assert float(moved.sum()) == 1 << 20


def test_memory_of_a_batch_is_not_given_away_while_kernels_read_it():
    move = CopyStream(torch.device("cuda", torch.cuda.current_device()))
    batches = [torch.full((1 << 16,), float(number)).pin_memory() for number in range(20)]
    sums = []
    for batch in batches:
        moved = move([batch])[0]
        torch.cuda._sleep(1 << 22)
        sums.append(moved.sum())
        del moved

    assert [float(total) for total in sums] == [float(number << 16) for number in range(20)]


def test_packed_sequences_train(tmp_path):
    packed = pack_sequence([torch.randn(5, 3), torch.randn(7, 3)], enforce_sorted=False)

    class Model(sg.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4)

        def training_step(self, batch, batch_idx):
            assert batch.batch_sizes.device.type == "cpu"
            return self.rnn(batch)[0].data.square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = sg.Trainer(accelerator="cuda", devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path)
    trainer.fit(Model(), [packed] * 3)

    assert trainer.global_step == 3


# --- Random states -----------------------------------------------------------------------------------------------


def test_random_states_come_back_and_a_sampler_of_ones_own_leaves_them():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.rand(3, device=device)
    state = random_state([device])
    first = torch.rand(3, device=device)
    restore_random_state(state, [device])
    with seeded(5):
        torch.rand(3)

    assert torch.equal(torch.rand(3, device=device), first)
    assert len(state["devices"]) == 1
    assert state["devices"][0].device.type == "cpu"


def test_a_run_on_the_cpu_is_forked_beside_the_gpu():
    code = (
        "import torch, stratagem as sg\n"
        "from stratagem_testing.reference import Net, joined_batches\n"
        "trainer = sg.Trainer(accelerator='cpu', strategy='ddp_fork', devices=2, max_epochs=1, logger=False,\n"
        "                     enable_checkpointing=False, enable_progress_bar=False)\n"
        "trainer.fit(Net(), joined_batches(2, 16))\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('trained', trainer.global_step)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=900)

    assert "trained 2" in result.stdout, result.stderr


def test_deterministic_products_are_allowed():
    with switch(RunSettings(deterministic=True), "cuda"):
        x = torch.randn(64, 64, device="cuda")
        torch.testing.assert_close(x @ x, (x.cpu() @ x.cpu()).cuda(), rtol=1e-3, atol=1e-3)
