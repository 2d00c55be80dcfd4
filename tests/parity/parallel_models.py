"""Models for tensor parallelism, as users write them: all they know of it are positions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem_parallel import context_offset
from stratagem_testing.reference import window_size

VOCABULARY, WIDTH, LENGTH = 37, 32, 12


def _places(ids):
    """Return the positions of `ids`, which may be a part of a sequence."""
    offset = context_offset(ids.shape[1])
    return torch.arange(ids.shape[1]) + offset


class Attention(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = (
            layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(heads, dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.residual = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.residual(self.attention(self.norm_1(x)))
        return x + self.residual(self.down(self.inner(F.gelu(self.up(self.norm_2(x))))))


class GPT(sg.Module):
    """A GPT whose head has the weight of its embedding."""

    def __init__(self, heads=4, dropout=0.0, layers=2, tied=True):
        super().__init__()
        with seeded(3):
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.dropout = nn.Dropout(dropout)
            self.layers = nn.ModuleList(Block(heads, dropout) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.dropout(self.tokens(ids) + self.places(_places(ids)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        ids, following = batch
        return 8 * F.cross_entropy(self(ids).view(-1, VOCABULARY), following.view(-1))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class _Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids):
        return self.tokens(ids) + self.places(_places(ids))


class _Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = weight

    def forward(self, x):
        return self.logits(self.norm(x))


class _Centered(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x - self.weight.mean(0)


class StackedGPT(sg.Module):
    """A GPT whose layers are one nn.Sequential, the first and the last of which share a weight.

    Args:
        centered: whether the second layer has that weight, too.
    """

    def __init__(self, layers=2, *, centered=False):
        super().__init__()
        with seeded(3):
            first = _Embeddings()
            blocks = [_Centered(first.tokens.weight)] * centered + [Block(4, 0.0) for _ in range(layers)]
            self.sequential_module = nn.Sequential(first, *blocks, _Head(first.tokens.weight))

    def training_step(self, batch, batch_idx):
        ids, following = batch
        return 8 * F.cross_entropy(self.sequential_module(ids).view(-1, VOCABULARY), following.view(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def texts(batches, samples, seed=7):
    """Return joined batches of random texts, each a (ids, following) pair."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(VOCABULARY, (batches, samples, LENGTH + 1), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in made]


def train_plainly(module, batches, accumulate=1, max_norm=None):
    """Train `module` without a trainer; return its weights and the norms before clipping."""
    optimizer, norms = module.configure_optimizers(), []
    module.train()
    for index, batch in enumerate(batches):
        (module.training_step(batch, index) / window_size(index, len(batches), accumulate)).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict(), norms


class Llama(sg.Module):
    """A Llama of Hugging Face, with grouped heads; its config carries a plan."""

    def __init__(self, tied=False):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        with seeded(4):
            config = LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=tied,
            )  # fmt: skip
            self.model = LlamaForCausalLM(config)

    def forward(self, ids):
        return self.model(input_ids=ids).logits

    def training_step(self, batch, batch_idx):
        return 8 * self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9)
