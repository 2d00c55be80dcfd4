"""A second script, without attention and normalization: python train_mlp.py '{"strategy": "ddp"}'."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import stratagem as sg

given = {
    "layers": 3, "width": 256, "micro": 4, "precision": "32-true", "strategy": "ddp", "devices": 1, "recompute": False,
    "options": {}, "counted": None,
} | json.loads(sys.argv[1])  # fmt: skip


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class MLP(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        width = given["width"]
        self.layers = nn.Sequential(*(Layer(width) for _ in range(given["layers"])), nn.Linear(width, 7))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index):
        return torch.randn(given["width"])


plugins = []
if given["counted"]:
    from stratagem_plan.counted import Counted

    plugins.append(Counted(folder=given["counted"]))
trainer = sg.Trainer(
    strategy=given["strategy"], devices=given["devices"], precision=given["precision"], max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, plugins=plugins,
    activation_checkpointing=[Layer] if given["recompute"] else None, **given["options"],
)  # fmt: skip
trainer.fit(MLP(), torch.utils.data.DataLoader(Samples(), batch_size=given["micro"]))
