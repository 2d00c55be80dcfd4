"""A training script as users write it: python train_gpt.py '{"layers": 2, "strategy": "ddp"}'.

With "count_to", each rank writes there what it sent in its steps; with "counted", rank 0 writes to that file what
`stratagem_plan.counter` counts in its last step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg

given = {
    "layers": 2, "width": 128, "heads": 4, "micro": 2, "vocab": 500, "length": 64, "precision": "32-true",
    "strategy": "ddp", "devices": 1, "recompute": False, "count_to": None, "options": {}, "counted": None,
} | json.loads(sys.argv[1])  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        width, vocab, length = given["width"], given["vocab"], given["length"]
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, given["heads"]) for _ in range(given["layers"]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.register_buffer("at", torch.arange(length), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.tokens(x) + self.positions(self.at[: x.shape[1]])
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index):
        both = torch.randint(0, given["vocab"], (2, given["length"]))
        return both[0], both[1]


class Count(sg.Callback):
    """Writes what was sent after the first step, and after the last one."""

    @sg.hookimpl
    def on_train_batch_end(self, run, batch_idx):
        counts = run.collectives.traffic.counts
        told = {f"{op} {sender}": [count.calls, count.payload] for (op, sender), count in counts.items()}
        Path(given["count_to"], f"{run.rank}-{batch_idx}.json").write_text(json.dumps(told))


plugins = []
if given["counted"]:
    from counted import Counted

    plugins.append(Counted(file=given["counted"]))
strategy = given["strategy"]
if isinstance(strategy, dict) and strategy.get("auto_wrap_policy"):
    strategy = strategy | {"auto_wrap_policy": {Block}}
trainer = sg.Trainer(
    strategy=strategy, devices=given["devices"], precision=given["precision"], max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, callbacks=[Count()] if given["count_to"] else [],
    plugins=plugins, activation_checkpointing=[Block] if given["recompute"] else None, **given["options"],
)  # fmt: skip
trainer.fit(GPT(), torch.utils.data.DataLoader(Words(), batch_size=given["micro"]))
