"""What stratagem does in a training step does not walk over the modules of the model, which may be thousands."""

from __future__ import annotations

import collections
import sys

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
CASES = {
    "single_device": (1, "single_device", {"precision": "bf16-mixed"}),
    "clipping": (1, "single_device", {"gradient_clip_val": 1.0}),
    "ddp": (2, "ddp", {}),
    "ddp, a comm hook": (2, "ddp", {"comm_hook": "fp16_compress"}),
    "ddp_sharded": (2, "ddp_sharded", {"gradient_clip_val": 1.0}),
    "fsdp": (2, "fsdp", {"gradient_clip_val": 1.0}),
    "tensor": (2, {"name": "parallel", "tensor": 2, "plan": {"net.0": "colwise"}}, {}),
    "shard": (2, {"name": "parallel", "shard": 2}, {}),
    "local_sgd": (2, "local_sgd", {}),
    "deepspeed_stage_1": (2, "deepspeed_stage_1", {}),
    "deepspeed_stage_2": (2, "deepspeed_stage_2", {"gradient_clip_val": 1.0}),
}


class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Within(sg.Callback):
    """Between the third and the ninth step."""

    now = False

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        self.now = 2 <= batch_idx < 8


def walks(rank, world_size, strategy, options):
    """Return which lines of stratagem walk over modules in a step, and how many lines of torch or an engine do."""
    within, lines, walk = Within(), collections.Counter(), nn.Module.named_modules

    def counted(self, *arguments, **named):
        if within.now:
            caller = sys._getframe(1)
            while "torch/nn/modules/" in caller.f_code.co_filename:
                caller = caller.f_back
            lines[f"{caller.f_code.co_filename}:{caller.f_lineno}"] += 1
        return walk(self, *arguments, **named)

    nn.Module.named_modules = counted
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, accelerator="cpu", max_epochs=1, callbacks=[within], **QUIET, **options
    )
    model = Model()
    trainer.fit(model, [torch.randn(3, 4) for _ in range(10)])
    within.now = True
    model.net.named_parameters().__next__()
    assert len(lines) > 0, "it counts"
    return [line for line in lines if "stratagem" in line.rpartition("site-packages")[2] and __file__ not in line]


@pytest.mark.slow
@pytest.mark.every_push("tensor", "deepspeed_stage_1", "deepspeed_stage_2")
@pytest.mark.parametrize("case", CASES)
def test_no_line_of_stratagem_walks_over_the_modules_in_a_step(case):
    world_size, strategy, options = CASES[case]
    assert run_in_processes(walks, world_size, strategy, options) == [[]] * world_size
