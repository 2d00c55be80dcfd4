"""A training script as users write it: python train_gpt.py '{"layers": 2, "strategy": "ddp"}'.

With "count_to", each rank writes to that folder what it sent in its steps; with "counted", what `stratagem_plan.counter`
counts in its last step. With "copies" 16-bit copies of weights stay until the end of a step. With "memory" CUDA has so many bytes; to "peaks" is written what it has allocated and reserved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.precisions import MixedPrecision
from stratagem_parallel import context_offset

given = {
    "layers": 2, "width": 128, "heads": 4, "micro": 2, "vocab": 500, "length": 64, "precision": "32-true",
    "strategy": "ddp", "devices": 1, "recompute": False, "experts": 0, "count_to": None, "counted": None, "options": {},
    "memory": None, "peaks": None, "copies": False,
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


class Experts(nn.Module):
    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, width, width) / width)

    def forward(self, tokens, indices, weights):
        return (tokens.unsqueeze(1) @ self.weight[indices.squeeze(1)]).squeeze(1) * weights


class Mixture(Block):
    """A block with experts, of which each gets as many tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.router, self.experts = nn.Linear(width, 1), Experts(width, given["experts"])

    def forward(self, x):
        x = super().forward(x)
        tokens = x.flatten(0, 1)
        indices = torch.arange(len(tokens), device=x.device).unsqueeze(1) % given["experts"]
        return x + self.experts(tokens, indices, self.router(tokens).sigmoid()).view_as(x)


class Blocks(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class GPT(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        width, vocab, length = given["width"], given["vocab"], given["length"]
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        block = Mixture if given["experts"] else Block
        self.blocks = Blocks(*(block(width, given["heads"]) for _ in range(given["layers"])))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        offset = context_offset(x.shape[1])
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device) + offset)
        h = self.blocks(h)
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


class KeepsCopies(MixedPrecision):
    """As bf16-mixed was when a GPU counted."""

    @sg.hookimpl(wrapper=True)
    def backward(self, run):
        with torch.autocast(run.device.type, enabled=False):
            return (yield)


if given["memory"]:
    torch.cuda.set_per_process_memory_fraction(given["memory"] / torch.cuda.get_device_properties(0).total_memory)
plugins = []
if given["counted"]:
    from stratagem_plan.counted import Counted

    plugins.append(Counted(folder=given["counted"]))
strategy = given["strategy"]
if isinstance(strategy, dict) and strategy.get("auto_wrap_policy"):
    strategy = strategy | {"auto_wrap_policy": {Block}}
trainer = sg.Trainer(
    strategy=strategy, devices=given["devices"], precision=KeepsCopies() if given["copies"] else given["precision"], max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, callbacks=[Count()] if given["count_to"] else [],
    plugins=plugins, activation_checkpointing=[Block] if given["recompute"] else None, **given["options"],
)  # fmt: skip
trainer.fit(GPT(), torch.utils.data.DataLoader(Words(), batch_size=given["micro"]))
if given["peaks"]:
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    Path(given["peaks"]).write_text(json.dumps(peaks))
