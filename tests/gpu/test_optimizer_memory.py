"""On a GPU: gradients that are freed in backward, and optimizer state on the host, take less memory and train alike."""

from __future__ import annotations

import pytest
import torch
from on_device import QUIET
from torch import nn

import stratagem as sg
from stratagem.callbacks import OptimizerOffload
from stratagem_testing.reference import relative_difference

pytestmark = pytest.mark.gpu
WIDTH, LAYERS = 1024, 16
#: Bytes of the parameters: 64 MiB.
PARAMETERS = 4 * LAYERS * WIDTH**2


class Deep(sg.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.net = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
        self.held, self.peak = 0, 0

    def training_step(self, batch, batch_idx):
        self.held = torch.cuda.memory_allocated()
        if batch_idx == 2:
            torch.cuda.reset_peak_memory_stats()
        return 100 * self.net(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.peak = torch.cuda.max_memory_allocated()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(*callbacks, ckpt_path=None, **options):
    torch.manual_seed(0)
    module = Deep()
    batches = list(torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1, "callbacks": list(callbacks)} | options))
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    return trainer, module, weights


def test_gradients_that_are_freed_in_backward_are_not_in_the_peak():
    _, plain, expected = fit()
    _, module, weights = fit("optimizer_in_backward")

    assert relative_difference(weights, expected) < 1e-6
    assert plain.peak - module.peak > 0.7 * PARAMETERS


@pytest.mark.parametrize("part_mb", [4, 1000])
def test_state_is_in_pinned_memory_between_steps(part_mb, tmp_path):
    _, plain, expected = fit()
    trainer, module, weights = fit(OptimizerOffload(part_mb=part_mb))

    assert relative_difference(weights, expected) < 1e-6
    states = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
    assert len(states) == LAYERS
    assert all(each.is_pinned() for each in states)
    assert plain.held - module.held > 1.9 * PARAMETERS
    if part_mb == 4:
        assert plain.peak - module.peak > PARAMETERS
    trainer.save_checkpoint(tmp_path / "begun.ckpt")
    resumed = [fit(*some, max_epochs=2, ckpt_path=tmp_path / "begun.ckpt")[2] for some in ((), ("optimizer_offload",))]
    assert relative_difference(*resumed) < 1e-6


def test_shards_are_gathered_for_a_checkpoint(tmp_path):
    trainer, _, _ = fit("optimizer_offload", strategy="fsdp")
    trainer.save_checkpoint(tmp_path / "begun.ckpt")
    state = torch.load(tmp_path / "begun.ckpt", weights_only=True)["optimizers"][0]["state"]

    assert all(float(each["exp_avg"].abs().sum()) > 0 for each in state.values())
