"""Batch normalization, random states and batches on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stratagem.batchnorm import synchronize
from stratagem.world import Collectives

pytestmark = pytest.mark.gpu


# --- Batch normalization -----------------------------------------------------------------------------------------


class Both(Collectives):
    """What two ranks with the same batch send each other."""

    world_size = 2

    def all_gather(self, tensor):
        return [tensor, tensor]

    def all_reduce(self, tensor, op="mean"):
        return tensor * 2


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
