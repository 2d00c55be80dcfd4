"""Checkpoints of what is trained alone tell the base model from another one, also where it was rounded to few bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratagem.checkpoint.trained_part import check_part, trained_part
from stratagem.errors import CheckpointError


class Adapted(nn.Module):
    """A frozen weight, which may be held as integers, and a trained one."""

    def __init__(self, seed=0, packed=False):
        super().__init__()
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        self.base = nn.Parameter(weight.to(torch.int8) if packed else weight, requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(4))
        self.logical = {"base": rounded(weight) if packed else weight, "adapter": self.adapter.detach()}


def rounded(weight):
    """Return `weight` in 4 bits: 16 levels between its extremes, as coarse as a quantized base."""
    step = (weight.max() - weight.min()) / 15
    return ((weight - weight.min()) / step).round() * step + weight.min()


def check(saved, loaded):
    state = trained_part(saved.logical, saved)
    return check_part(state["state_dict"], state["frozen"], loaded.logical, loaded, True, "a.ckpt")


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), (True, True)])
def test_a_base_of_few_bits_is_the_same_base(saved, loaded):
    assert check(Adapted(packed=saved), Adapted(packed=loaded)) is False

    with pytest.raises(CheckpointError, match="the frozen 'base' of this model has other values"):
        check(Adapted(packed=saved), Adapted(seed=1, packed=loaded))


def test_of_a_base_in_full_precision_smaller_differences_are_found():
    other = Adapted()
    other.logical["base"] = rounded(other.logical["base"])

    with pytest.raises(CheckpointError, match="the frozen 'base' of this model has other values"):
        check(Adapted(), other)
    other.logical["base"] = Adapted().logical["base"].bfloat16()
    assert check(Adapted(), other) is False
