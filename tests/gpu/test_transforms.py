"""What changes a model before it trains: compiled, its activations computed again or offloaded, its batch norms synchronized."""

from __future__ import annotations

import pytest
import torch
from on_device import DEVICE, OTHER_ORDER, differing, fit, run_ranks
from test_ranks import share_of, talk  # noqa: F401 - a fixture
from torch import nn

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import weights_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        return x + nn.functional.gelu(self.norm(self.linear(x)))


class Deep(Net):
    def __init__(self, dropout=0.0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(4)
            self.net = nn.Sequential(
                nn.Linear(16, 32), Block(), nn.Dropout(dropout), Block(), nn.Dropout(dropout), nn.Linear(32, 1)
            )


class Normalized(Net):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))


UNITS = {"name": "fsdp", "auto_wrap_policy": {Block}}
COMPILED = {
    "steps": {}, "blocks": {"per_block": True}, "without graphs": {"mode": "max-autotune-no-cudagraphs"},
    "graphs": {"mode": "reduce-overhead"}, "sizes that vary": {"dynamic": True},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param("graphs", marks=pytest.mark.gpu), *(name for name in COMPILED if name != "graphs")]
)
def test_compiled_steps_and_blocks_train_the_same(name):
    batches = joined_batches(6, 16)
    reference, norms = train_module_plainly(Deep(), batches, max_norm=1.0)
    weights, _ = fit(Deep(), batches, strategy="ddp", gradient_clip_val=1.0, compile=COMPILED[name])

    assert max(norms) > 1
    assert relative_difference(weights, reference) < OTHER_ORDER


def test_compiled_units_train_the_same():
    batches = joined_batches(6, 16)
    weights, _ = fit(Deep(), batches, strategy=UNITS, gradient_clip_val=1.0, compile=True)

    assert relative_difference(weights, train_module_plainly(Deep(), batches, max_norm=1.0)[0]) < OTHER_ORDER


@pytest.mark.parametrize("strategy", ["single_device", UNITS], ids=["single_device", "fsdp"])
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_recomputed_and_offloaded_activations_change_no_bit(mode, strategy):
    batches = joined_batches(4, 16)

    def trained(wanted):
        torch.manual_seed(7)
        return fit(Deep(dropout=0.2), batches, strategy=strategy, activation_checkpointing=wanted)[0]

    assert differing(trained(None), trained({"policy": {Block}, "mode": mode})) == []


def _synchronized(rank, world_size, options):
    trainer = sg.Trainer(
        max_epochs=1, strategy={"name": "ddp", **options}, devices=world_size, sync_batchnorm=True, accelerator=DEVICE,
        logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Normalized(), share_of(rank, world_size))
    return weights_of(trainer)


def test_batch_norms_of_two_ranks_see_the_batches_of_both(talk):  # noqa: F811
    reference, _ = train_module_plainly(Normalized(), joined_batches(10, 32))
    for weights in run_ranks(_synchronized, 2, talk):
        assert relative_difference(weights, reference) < OTHER_ORDER
