"""The finite check on a GPU: the host reads losses late, and still names the batch, the rank and the gradient."""

from __future__ import annotations

import math
import re

import pytest
from on_device import QUIET, run_ranks
from test_ranks import talk  # noqa: F401 - a fixture

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

BAD = 3


class Bad(Net):
    """The loss, or a gradient alone, of the last rank is not finite in batch `BAD`."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx != BAD or self.trainer.global_rank + 1 < self.trainer.world_size:
            return loss
        if self.value == "gradient":
            return loss + 0 * (0 * next(self.parameters())).sqrt().sum()
        return loss + self.value


def said(value, **options):
    """Return what a fit of 24 batches ends with."""
    with pytest.raises(Exception) as raised:
        sg.Trainer(**(QUIET | {"max_epochs": 1} | options)).fit(Bad(value), joined_batches(24, 16))
    return str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_batch_of_a_loss_is_named(value):
    assert said(value).startswith(f"the loss of rank 0 is {value} in batch {BAD} of epoch 0, after {BAD} steps")


def test_the_gradient_is_named_where_it_appears():
    first = next(name for name, _ in Net().named_parameters())
    text = said("gradient", checks={"name": "finite", "gradients": True})
    assert f"the gradient of {first!r} is not finite on rank 0 in batch {BAD}" in text


def _ranks(rank, world_size, options):
    return said(math.nan, strategy={"name": "ddp"} | options, devices=world_size)


def test_the_rank_of_a_loss_is_named(talk):  # noqa: F811
    texts = run_ranks(_ranks, 2, talk)
    assert all(re.search("rank 1", text) for text in texts), texts
    assert any(f"the loss of rank 1 is nan in batch {BAD}" in text for text in texts), texts
