"""A GPT of any size: python gpt.py LAYERS WIDTH SEQUENCES; docs/advise.md asks for advice about it."""

import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg

LAYERS, WIDTH, SEQUENCES = map(int, sys.argv[1:])
LENGTH, VOCABULARY, HEAD = 2048, 32000, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norm_1(x)
        q, k, v = (each(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(sg.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def training_step(self, batch):
        logits = self.head(self.blocks(self.tokens(batch)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.randint(VOCABULARY, (LENGTH,))


trainer = sg.Trainer(precision="bf16-mixed", max_steps=1000)
trainer.fit(GPT(), torch.utils.data.DataLoader(Text(), batch_size=SEQUENCES))
