"""Llama 3 8B with the settings of torchtitan's published readings of memory: python train_llama.py '{"layers": 32}'.

Every second product of matrices and attention are kept for backward, everything else is computed again.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import stratagem as sg

given = {
    "layers": 32, "width": 4096, "heads": 32, "kv": 8, "ffn": 14336, "vocab": 128256, "length": 8192, "micro": 2,
} | json.loads(sys.argv[1])  # fmt: skip
aten = torch.ops.aten
KEPT = {
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention.default,
}  # fmt: skip


def contexts():
    products = defaultdict(int)

    def policy(context, operator, *args, **kwargs):
        if operator is aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        else:
            keeps = operator in KEPT
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def rotated(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width, self.heads, self.kv = given["width"], given["heads"], given["kv"]
        self.size = width // self.heads
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, self.kv * self.size, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, given["ffn"], bias=False) for _ in range(2))
        self.w2 = nn.Linear(given["ffn"], width, bias=False)

    def forward(self, x, freqs):
        return checkpoint(self.compute, x, freqs, use_reentrant=False, context_fn=contexts)

    def compute(self, x, freqs):
        h = self.attention_norm(x)
        b, s, _ = h.shape
        q, k, v = (layer(h).view(b, s, -1, self.size) for layer in (self.wq, self.wk, self.wv))
        q, k = rotated(q, freqs), rotated(k, freqs)
        repeats = self.heads // self.kv
        k, v = (t[:, :, :, None].expand(b, s, self.kv, repeats, self.size).reshape(b, s, -1, self.size) for t in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(sg.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(given["vocab"], given["width"])
        self.layers = nn.ModuleList(Block() for _ in range(given["layers"]))
        self.norm, self.output = Norm(given["width"]), nn.Linear(given["width"], given["vocab"], bias=False)
        size = given["width"] // given["heads"]
        self.register_buffer("freqs", torch.zeros(given["length"], size // 2, dtype=torch.complex64), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.tok_embeddings(x)
        for layer in self.layers:
            h = layer(h, self.freqs)
        return F.cross_entropy(self.output(self.norm(h)).flatten(0, 1).float(), y.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return torch.zeros(given["length"], dtype=torch.long), torch.zeros(given["length"], dtype=torch.long)


strategy = {"name": "fsdp", "auto_wrap_policy": {Block}}
sg.Trainer(strategy=strategy, precision="bf16-mixed", max_steps=2, gradient_clip_val=1.0).fit(
    Llama(), torch.utils.data.DataLoader(Words(), batch_size=given["micro"])
)
