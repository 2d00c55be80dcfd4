"""Tokens per second of packed rows, beside batches that are padded to their longest sequence.

    python benchmarks/packing.py [--quick]

Training steps of a small GPT on one thread, and of a Llama of the same size where transformers is installed, on
sequences whose lengths are log-normal: a median of 150 tokens, sigma 0.8, at most 1024. Padding does not count as
tokens. "grouped" are batches of `LengthGroupedSampler`, in two groups. Packed rows compute attention with
`document_attention`, and with a mask; Llama makes a mask of `position_ids`. Ways alternate; seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from stratagem_sequences import LengthGroupedSampler, PackingCollator, document_attention, document_mask

LONGEST, VOCABULARY, WIDTH, LAYERS, HEADS = 1024, 512, 128, 4, 4
SAMPLES_PER_BATCH = 16


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.projections = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
             for _ in range(LAYERS)]
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for project, mlp in zip(self.projections, self.mlps, strict=True):
            query, key, value = project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + attend(query, key, value).transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def causal(model: GPT, batch: dict[str, Tensor]) -> Tensor:
    return model(batch, partial(F.scaled_dot_product_attention, is_causal=True))


def within_documents(model: GPT, batch: dict[str, Tensor]) -> Tensor:
    return model(batch, document_attention(batch["document_ids"]))


def masked(model: GPT, batch: dict[str, Tensor]) -> Tensor:
    return model(batch, partial(F.scaled_dot_product_attention, attn_mask=document_mask(batch["document_ids"])))


def of_transformers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    named = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    loss: Tensor = model(**named, use_cache=False).loss
    return loss


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=LONGEST, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = [sample["input_ids"] for sample in samples]
    ids, labels = (pad_sequence(tokens, batch_first=True, padding_value=value) for value in (0, -100))
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


def loaders(steps: int) -> dict[str, Iterable[dict[str, Tensor]]]:
    """Return a loader for each way to make batches of the same samples."""
    torch.manual_seed(0)
    lengths = torch.empty(steps * SAMPLES_PER_BATCH).log_normal_(5, 0.8).long().clamp(2, LONGEST)
    samples = [{"input_ids": torch.randint(VOCABULARY, (int(length),))} for length in lengths]
    grouped = LengthGroupedSampler(lengths, steps * SAMPLES_PER_BATCH // 2)
    data: Any = samples
    return {
        "padded": list(DataLoader(data, SAMPLES_PER_BATCH, collate_fn=padded)),
        "grouped": list(DataLoader(data, SAMPLES_PER_BATCH, sampler=grouped, collate_fn=padded)),
        "packed": list(DataLoader(data, SAMPLES_PER_BATCH, collate_fn=PackingCollator(max_tokens=LONGEST))),
    }


def ways() -> Iterator[tuple[str, Callable[[], nn.Module], dict[str, tuple[str, Callable[..., Tensor]]]]]:
    """Yield models with their columns: which batches, and how the loss is computed."""
    yield "GPT", GPT, {
        "padded": ("padded", causal), "padded, grouped": ("grouped", causal),
        "packed": ("packed", within_documents), "packed, with a mask": ("packed", masked),
    }  # fmt: skip
    try:
        import transformers  # noqa: F401
    except ImportError:
        return
    yield "Llama", llama, {
        "padded": ("padded", of_transformers), "padded, grouped": ("grouped", of_transformers),
        "packed": ("packed", of_transformers),
    }  # fmt: skip


def tokens_per_second(model: nn.Module, loss: Callable[..., Tensor], batches: Iterable[dict[str, Tensor]]) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, began = 0, time.process_time()
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((batch["labels"] != -100).sum())
    return tokens / (time.process_time() - began)


def _share_of_tokens(batches: Iterable[dict[str, Tensor]]) -> float:
    labelled = [batch["labels"] != -100 for batch in batches]
    return sum(int(each.sum()) for each in labelled) / sum(each.numel() for each in labelled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    rounds, steps = (1, 2) if parser.parse_args().quick else (3, 8)
    torch.set_num_threads(1)
    batches = loaders(steps)
    used = {name: _share_of_tokens(each) for name, each in batches.items()}
    print("| | tokens per second | of padded | places with a token |\n|---|---|---|---|")
    for model, make, columns in ways():
        found: dict[str, list[float]] = {column: [] for column in columns}
        for _ in range(rounds):
            for column, (kind, loss) in columns.items():
                found[column].append(tokens_per_second(make(), loss, batches[kind]))
        plain = found["padded"]
        for column, rates in found.items():
            ratio = statistics.median(rate / base for rate, base in zip(rates, plain, strict=True))
            rate, share = statistics.median(rates), used[columns[column][0]]
            print(f"| {model}, {column} | {rate:,.0f} | {ratio:.2f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
